"""Measures the memory and compute usage of a program from outside its processes."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from shoal.cluster.machine import threads
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.worker.opaque.program_process import visible_device

__all__ = ["UsageMonitor", "program_profile"]

INTERVAL_SECONDS = 0.5

REPORTED_GROWTH = 1.1
"""Growth factor of the memory after which a new profile is reported."""

_MIN_SHARE = 0.01

_MIN_SECONDS = 1e-6


def program_profile(seconds: float, memory: int, compute: float, cores: float) -> Profile:
    """Return the profile of a program, with each report as a step and as an epoch."""
    return Profile({1: seconds}, 1, 0, base_memory=memory, member_memory=0, compute=compute, cores=cores, sample=1)


class UsageMonitor:
    """Samples the resource usage of a program's processes, without the main memory inherited from this process."""

    def __init__(self, tree: Callable[[], Sequence[psutil.Process]], device: Device, inherited_memory: int = 0) -> None:
        self._tree = tree
        self._device = device
        self._inherited_memory = inherited_memory
        self._gpu = _Gpu(device) if device.is_cuda else None
        self._sampled = 0.0
        self._memory = 0
        self._cpu = 0.0
        self._reports = 0
        self._seconds = 0.0  # minimum time from one report to the next
        self._first = (0.0, 0.0)  # time of the first report, and CPU seconds until then
        self._reported_memory = 0

    def sample(self, *, now: bool = False) -> None:
        """Take a sample, if one is due or `now` is set."""
        moment = time.monotonic()
        if not now and moment - self._sampled < INTERVAL_SECONDS:
            return
        self._sampled = moment
        memory, cpu, pids = 0, 0.0, set()
        for process in self._tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                with process.oneshot():
                    memory += process.memory_info().rss
                    cpu += sum(process.cpu_times()[:4])  # the third and fourth value are of ended children
                pids.add(process.pid)
        self._cpu = max(self._cpu, cpu)
        if self._gpu is not None:
            self._gpu.sample(pids)
        else:
            self._memory = max(self._memory, memory - self._inherited_memory)

    def report(self, seconds: float) -> Profile | None:
        """Count a report after so many seconds; return the profile, but not at first or without growth of memory."""
        self.sample(now=self._reports < 3)
        self._reports += 1
        if self._reports == 1:
            self._seconds, self._first = seconds, (time.monotonic(), self._cpu)
            return None
        self._seconds = seconds if self._reports == 2 else min(seconds, self._seconds)
        return self._make_profile() if self.memory_used > REPORTED_GROWTH * self._reported_memory else None

    def finish(self) -> Profile | None:
        """Return the profile at the end of the program, if none was returned before; else None."""
        return self._make_profile() if self._reports and self.memory_used and not self._reported_memory else None

    def close(self) -> None:
        """Close the driver of the GPU, if the monitor has opened it."""
        if self._gpu is not None:
            self._gpu.close()

    @property
    def memory_used(self) -> int:
        """Peak bytes on the device so far; 0 if unknown."""
        return self._memory if self._gpu is None else self._gpu.memory

    def _make_profile(self) -> Profile:
        self._reported_memory = self.memory_used
        moment, cpu = self._first
        if self._reports == 1:
            cores = cpu / max(self._seconds, _MIN_SECONDS)
        else:
            cores = (self._cpu - cpu) / max(time.monotonic() - moment, _MIN_SECONDS)
        cores = min(max(_MIN_SHARE, cores), float(self._device.cores))
        compute = cores / threads(self._device.cores) if self._gpu is None else self._gpu.compute
        memory = min(self._reported_memory, self._device.memory)
        return program_profile(self._seconds, memory, min(1.0, max(_MIN_SHARE, compute)), cores)


class _Gpu:
    """Samples a GPU by NVML; without it, the program is assumed to use the whole GPU.

    If NVML lists other process ids, as in a container, all memory since the start counts as the program's.
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

    def close(self) -> None:
        """Close NVML, since a process with an open driver is not forked."""
        if self._handle is not None:
            self._handle = None
            self._nvml.nvmlShutdown()

    @property
    def compute(self) -> float:
        """Fraction of time with any kernel running, an upper bound; 1 if unknown."""
        return sum(self._loads) / len(self._loads) if self._loads else 1.0

    def sample(self, pids: set[int]) -> None:
        """Sample the memory of these processes, and the load of the GPU."""
        if self._handle is None:
            return
        nvml = self._nvml
        try:
            listed = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            own = sum(int(each.usedGpuMemory or 0) for each in listed if each.pid in pids)
            used = int(nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            self.memory = max(self.memory, own or used - self._before)
            self._loads.append(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
        except nvml.NVMLError:  # not all devices and drivers support all of these calls
            return
