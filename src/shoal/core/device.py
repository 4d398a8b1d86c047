"""Devices, nodes and clusters, as immutable values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

__all__ = ["Cluster", "Device", "Node"]


@dataclass(frozen=True)
class Device:
    """A GPU, or a slot of a node's CPU.

    Args:
        name: Name, unique in the cluster: "cuda:0", "mig:2" (an instance of a GPU), "cpu:1", "mps:0", "xpu:0"; of a
            device of several nodes "ash/cuda:0".
        kind: Kind; devices of one kind share measurements: "NVIDIA H200", "cpu".
        memory: Bytes that jobs may use.
        cores: CPU cores that a job on it may use as threads.
        compute: Capacity in units of a job's `Demand.compute`.
        oversubscription: Factor by which reservations of compute may exceed its compute (HyperSack: r).
        healthy: Whether it gets jobs.
        uuid: Id by which a process is bound to a GPU or an instance of one ("GPU-...", "MIG-..."); "" of other devices.
        note: Reason why it is unhealthy, or the memory that other programs hold, which `memory` excludes; else "".
    """

    name: str
    kind: str
    memory: int
    cores: int = 1
    compute: float = 1.0
    oversubscription: float = 1.0
    healthy: bool = True
    uuid: str = ""
    note: str = ""

    @property
    def node(self) -> str:
        """Name of its node where there are several; else ""."""
        return self.name.rpartition("/")[0]

    @property
    def local_name(self) -> str:
        """Name on its node."""
        return self.name.rpartition("/")[2]

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU of NVIDIA's or an instance of one."""
        return self.local_name.startswith(("cuda:", "mig:"))

    @property
    def is_cpu(self) -> bool:
        """Whether it is a slot of a node's CPU, as `shoal.host.discover` makes them."""
        return self.kind.startswith("cpu/")

    @property
    def supports_mps(self) -> bool:
        """Whether it can have an MPS daemon: a whole NVIDIA GPU. Instances of MIG are shared without MPS."""
        return self.uuid.startswith("GPU-")

    @property
    def torch_name(self) -> str:
        """Name in torch, in a process that sees all devices; of instances of GPUs a process sees only one."""
        name = self.local_name
        if self.is_cuda:
            return name if name.startswith("cuda:") else "cuda:0"
        if name.startswith("mps:"):  # there is only one
            return "mps"
        return name if name.startswith("xpu:") else "cpu"

    @property
    def capacity(self) -> float:
        """Compute that jobs may reserve: oversubscription times compute."""
        return self.oversubscription * self.compute


@dataclass(frozen=True)
class Node:
    """A machine; the jobs on all its devices share its CPU cores."""

    name: str
    cores: float
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Cluster:
    """All nodes at one moment."""

    nodes: tuple[Node, ...]

    def __iter__(self) -> Iterator[tuple[Node, Device]]:
        return iter(self._pairs)

    @cached_property
    def _pairs(self) -> tuple[tuple[Node, Device], ...]:
        return tuple((node, device) for node in self.nodes for device in node.devices)

    def device(self, name: str) -> Device:
        """The device of that name; KeyError if there is none."""
        return self.places[name][1]

    def map(self, function: Callable[[Device], Device]) -> "Cluster":
        """The cluster with the result of a function in place of each device."""
        return Cluster(tuple(replace(node, devices=tuple(map(function, node.devices))) for node in self.nodes))

    def select(self, wanted: Callable[[Device], bool]) -> "Cluster":
        """The cluster of the devices for which a function is true; nodes without one are left out."""
        nodes = (replace(node, devices=tuple(filter(wanted, node.devices))) for node in self.nodes)
        return Cluster(tuple(node for node in nodes if node.devices))

    @cached_property
    def unhealthy(self) -> frozenset[str]:
        """Names of the devices that get no jobs."""
        return frozenset(device.name for _, device in self if not device.healthy)

    @cached_property
    def places(self) -> Mapping[str, tuple[Node, Device]]:
        """Name of each device -> its node and the device."""
        return {place[1].name: place for place in self}
