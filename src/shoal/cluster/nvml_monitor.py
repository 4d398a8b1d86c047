"""The monitor that reads the conditions of GPUs through NVML."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.cluster.monitor import Condition, Holder
from shoal.cluster.nvml import Gpu, binding, read_gpu, trouble
from shoal.cluster.processes import descends, is_visible
from shoal.core.device import Cluster, Device

__all__ = ["NvmlMonitor"]

_MPS_SERVER = "nvidia-cuda-mps-server"
"""It holds little memory itself; NVML lists its clients. The study's own server does not descend from its engine."""

_UNNAMED = 2**30
"""Bytes that may be in use without a named program, by contexts and the driver."""


@dataclass
class _Before:
    """The state of a GPU before the first job of the study on it.

    Args:
        pids: Process ids of the programs on it.
        unnamed: Bytes in use without a named program; in many containers NVML names none.
        uncorrected: Number of uncorrected ECC errors.
    """

    pids: frozenset[int]
    unnamed: int
    uncorrected: int


class NvmlMonitor:
    """Monitors a cluster of this machine; the conditions of CPU slots and devices that NVML cannot read do not change.

    In a container NVML may list the host's process ids, or none. So a process that is not visible counts as foreign
    only if it was on the GPU before the study's jobs; a later one may be the study's own.

    Args:
        cluster: Cluster of the monitored devices; no job of the study runs there yet.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._devices: tuple[Device, ...] = ()
        self._before: dict[str, _Before] = {}
        self._last: dict[str, Condition] = {}
        self.watch(cluster)

    def watch(self, cluster: Cluster) -> None:
        """Monitor these devices from now on.

        Args:
            cluster: Cluster of the devices; no job of the study runs yet on a device that is new.
        """
        self._devices = tuple(device for _, device in cluster)
        if new := [device for device in self._watched() if device.uuid not in self._before]:
            self._last |= self._look(new, ())

    def look(self, own: Collection[int]) -> Mapping[str, Condition]:
        """Return the condition of every device by name; see `Monitor`."""
        seen = {each.name: Condition(each.healthy, each.note) for each in self._devices}
        if watched := self._watched():
            seen |= self._look(watched, own)
        self._last = seen
        return seen

    def _watched(self) -> list[Device]:
        """Return the devices that NVML could read at the start; the others stay unusable."""
        return [device for device in self._devices if device.uuid and device.memory]

    def _look(self, devices: Collection[Device], own: Collection[int]) -> Mapping[str, Condition]:
        import pynvml

        try:
            with binding() as nvml:
                return {device.name: self._condition(device, _gpu(nvml, device), own) for device in devices}
        except (pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_LibraryNotFound):
            return {device.name: Condition(False, "the NVIDIA driver is gone") for device in devices}
        except pynvml.NVMLError:  # as during an update of the driver: the last conditions stay
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
    """Read the device by its UUID, as its index may change."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
    except nvml.NVMLError_NotFound:
        return Gpu(device.uuid, reason="has fallen off the bus" if device.name.startswith("cuda:") else "is gone")
    except nvml.NVMLError as error:
        return Gpu(device.uuid, reason=trouble(nvml, error))
    return read_gpu(nvml, handle)
