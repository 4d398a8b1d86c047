"""Watches GPUs through NVML."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.cluster.monitor import Condition, Holder
from shoal.cluster.nvml import Gpu, binding, read_gpu, trouble
from shoal.cluster.processes import descends, is_visible
from shoal.core.device import Cluster, Device

__all__ = ["NvmlMonitor"]

_MPS_SERVER = "nvidia-cuda-mps-server"
"""It holds little, and what its clients hold is listed with them; the study's own does not descend from its engine."""

_UNNAMED = 2**30
"""Bytes that may be held with no program named for them, as contexts and the driver's books take some."""


@dataclass
class _Before:
    """A GPU as it was before any job of the study ran there.

    Args:
        pids: of the programs on it.
        unnamed: bytes held for which NVML named no program: in many containers it names none.
        uncorrected: ECC errors.
    """

    pids: frozenset[int]
    unnamed: int
    uncorrected: int


class NvmlMonitor:
    """The monitor of a cluster of this machine; CPU slots, and devices that NVML could not tell of, stay as they are.

    In a container NVML may list the host's process ids, or none. So a process that cannot be seen from here counts as
    another's only if it was on the GPU before the study's jobs; those that came later may be the study's own.

    Args:
        cluster: whose devices are watched; none of the study's jobs runs there yet.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._devices: tuple[Device, ...] = ()
        self._before: dict[str, _Before] = {}
        self._last: dict[str, Condition] = {}
        self.watch(cluster)

    def watch(self, cluster: Cluster) -> None:
        """From now on watch these devices.

        Args:
            cluster: none of the study's jobs runs on those of its devices that were not watched until now.
        """
        self._devices = tuple(device for _, device in cluster)
        if new := [device for device in self._watched() if device.uuid not in self._before]:
            self._last |= self._look(new, ())

    def look(self, own: Collection[int]) -> Mapping[str, Condition]:
        """See `Monitor`."""
        seen = {each.name: Condition(each.healthy, each.note) for each in self._devices}
        if watched := self._watched():
            seen |= self._look(watched, own)
        self._last = seen
        return seen

    def _watched(self) -> list[Device]:
        """Devices that NVML knows, and of which it told what they are; others would be no use if they came back."""
        return [device for device in self._devices if device.uuid and device.memory]

    def _look(self, devices: Collection[Device], own: Collection[int]) -> Mapping[str, Condition]:
        import pynvml

        try:
            with binding() as nvml:
                return {device.name: self._condition(device, _gpu(nvml, device), own) for device in devices}
        except (pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_LibraryNotFound):
            return {device.name: Condition(False, "the NVIDIA driver is gone") for device in devices}
        except pynvml.NVMLError:  # as while the driver is updated: what runs goes on, and nothing new is known
            return {each.name: self._last.get(each.name, Condition(each.healthy, each.note)) for each in devices}

    def _condition(self, device: Device, gpu: Gpu, own: Collection[int]) -> Condition:
        if gpu.reason:
            return Condition(False, gpu.reason)
        unnamed = max(0, gpu.memory - gpu.free - sum(holder.memory or 0 for holder in gpu.holders))
        before = self._before.setdefault(
            device.uuid, _Before(frozenset(holder.pid for holder in gpu.holders), unnamed, gpu.uncorrected)
        )
        if gpu.uncorrected > before.uncorrected:
            return Condition(False, "ECC errors that cannot be corrected")
        before.uncorrected = gpu.uncorrected  # a reset sets the count to 0
        before.unnamed = min(before.unnamed, unnamed)
        others = [
            holder
            for holder in gpu.holders
            if holder.name != _MPS_SERVER
            and not descends(holder.pid, own)
            and (is_visible(holder.pid) or holder.pid in before.pids)
        ]
        if before.unnamed > _UNNAMED:
            others.append(Holder(0, "programs that NVML does not name", before.unnamed))
        return Condition(holders=tuple(others))


def _gpu(nvml: Any, device: Device) -> Gpu:
    """The device as it is now, under whatever index."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
    except nvml.NVMLError_NotFound:
        return Gpu(device.uuid, reason="has fallen off the bus" if device.name.startswith("cuda:") else "is gone")
    except nvml.NVMLError as error:
        return Gpu(device.uuid, reason=trouble(nvml, error))
    return read_gpu(nvml, handle)
