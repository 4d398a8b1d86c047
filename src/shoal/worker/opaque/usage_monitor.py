"""What a program of the user's takes of its device, seen from outside."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from shoal.cluster.machine import threads
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.worker.opaque.child import visible_device

__all__ = ["UsageMonitor", "watched"]

INTERVAL_SECONDS = 0.5
"""Between two looks."""

MORE = 1.1
"""What was told of the memory is told again when it is so many times as much."""

_LEAST = 0.01
"""Of a device's compute and of cores; nothing takes none."""

_SHORTEST = 1e-6
"""Seconds."""


def watched(seconds: float, memory: int, compute: float, cores: float) -> Profile:
    """The profile of a program: a report is a step, and an epoch.

    Args:
        seconds: from one report to the next.
        memory: peak bytes on the device.
        compute: fraction of the device in use.
        cores: CPU seconds per second.
    """
    return Profile({1: seconds}, 1, 0, base_memory=memory, member_memory=0, compute=compute, cores=cores, sample=1)


class UsageMonitor:
    """Looks at the processes of a program now and then.

    Args:
        tree: the processes that there are now, that of the program first.
        device: where they run.
    """

    def __init__(self, tree: Callable[[], Sequence[psutil.Process]], device: Device) -> None:
        self._tree = tree
        self._device = device
        self._gpu = _Gpu(device) if device.is_cuda else None
        self._looked = 0.0
        self._memory = 0
        self._cpu = 0.0
        self._reports = 0
        self._seconds = 0.0  # from one report to the next, the least
        self._first = (0.0, 0.0)  # when the first report came, and CPU seconds until then
        self._told = 0

    def look(self, *, now: bool = False) -> None:
        """Take a sample, if it is time, or in any case."""
        moment = time.monotonic()
        if not now and moment - self._looked < INTERVAL_SECONDS:
            return
        self._looked = moment
        memory, cpu, pids = 0, 0.0, set()
        for process in self._tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                with process.oneshot():
                    memory += process.memory_info().rss
                    cpu += sum(process.cpu_times()[:4])  # those of ended children are the third and fourth
                pids.add(process.pid)
        self._cpu = max(self._cpu, cpu)
        if self._gpu is not None:
            self._gpu.look(pids)
        else:
            self._memory = max(self._memory, memory)

    def report(self, seconds: float) -> Profile | None:
        """The program has reported, so many seconds after its last report or its start.

        Returns:
            What has been learnt, from the second report on, as the first holds the start; None if it is no news.
        """
        self.look(now=self._reports < 3)
        self._reports += 1
        if self._reports == 1:
            self._seconds, self._first = seconds, (time.monotonic(), self._cpu)
            return None
        self._seconds = seconds if self._reports == 2 else min(seconds, self._seconds)
        return self._learnt() if self._held > MORE * self._told else None

    def finish(self) -> Profile | None:
        """It reports no more; returns what has been learnt, if nothing was told so far."""
        return self._learnt() if self._reports and self._held and not self._told else None

    @property
    def _held(self) -> int:
        return self._memory if self._gpu is None else self._gpu.memory

    def _learnt(self) -> Profile:
        self._told = self._held
        moment, cpu = self._first
        if self._reports == 1:
            cores = cpu / max(self._seconds, _SHORTEST)
        else:
            cores = (self._cpu - cpu) / max(time.monotonic() - moment, _SHORTEST)
        cores = min(max(_LEAST, cores), float(self._device.cores))
        compute = cores / threads(self._device.cores) if self._gpu is None else self._gpu.compute
        memory = min(self._told, self._device.memory)
        return watched(self._seconds, memory, min(1.0, max(_LEAST, compute)), cores)


class _Gpu:
    """What NVML says of a GPU; where it says nothing, a program is taken to need all of it.

    In a container NVML may list other ids of processes than are known here. Then what was taken since the program began
    counts as its own.
    """

    def __init__(self, device: Device) -> None:
        self.memory = 0
        self._loads: list[float] = []
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        place = visible_device(device)
        try:
            pynvml.nvmlInit()
            of = pynvml.nvmlDeviceGetHandleByIndex if place.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
            self._handle = of(int(place) if place.isdecimal() else place)
            self._before = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except pynvml.NVMLError:
            self._handle = None

    @property
    def compute(self) -> float:
        """The share of time in which any kernel ran, an upper bound; 1 where that is unknown."""
        return sum(self._loads) / len(self._loads) if self._loads else 1.0

    def look(self, pids: set[int]) -> None:
        """Take a sample of what these processes hold."""
        if self._handle is None:
            return
        nvml = self._nvml
        try:
            listed = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            own = sum(int(each.usedGpuMemory or 0) for each in listed if each.pid in pids)
            used = int(nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            self.memory = max(self.memory, own or used - self._before)
            self._loads.append(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
        except nvml.NVMLError:  # not every device and driver answers all of these
            return
