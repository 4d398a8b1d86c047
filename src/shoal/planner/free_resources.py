"""What is left of devices and nodes for trials that join running jobs."""

from collections.abc import Iterable

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device

__all__ = ["FreeResources"]

_ROUNDING = 1e-9
"""Cores; what is less is due to rounding."""


class FreeResources:
    """Bytes of devices and cores of nodes that no job takes.

    Where jobs take more than there is, because more is expected of them by now than they were promised, nothing is left
    whatever is asked for.

    Args:
        cluster: as it is; devices that are not healthy have no room.
        held: of each job its device and what it takes.
    """

    def __init__(self, cluster: Cluster, held: Iterable[tuple[Device, Demand]]) -> None:
        self._memory = {device.name: device.memory for _, device in cluster if device.healthy}
        self._node = {device.name: node.name for node, device in cluster}
        self._cores = {node.name: float(node.cores) for node in cluster.nodes}
        for device, demand in held:
            self.take(device.name, demand.memory, demand.cores)

    def __contains__(self, device: str) -> bool:
        """Whether a device is there and healthy."""
        return device in self._memory

    def memory(self, device: str) -> int:
        """Bytes that are left of a device; at most 0 where the cores of its node are overdrawn."""
        left = self._memory[device]
        return left if self._cores[self._node[device]] >= -_ROUNDING else min(left, 0)

    def holds(self, device: str, memory: int, cores: float) -> bool:
        """Whether so much more can be taken of a device and of the cores of its node."""
        left = self._cores[self._node[device]]
        return memory <= self.memory(device) and cores <= left + _ROUNDING

    def take(self, device: str, memory: int, cores: float = 0.0) -> None:
        """Take so much."""
        if device in self._memory:
            self._memory[device] -= memory
        self._cores[self._node[device]] -= cores
