"""Starts and ends the process of a program, and measures its memory and compute from outside."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.host.machine import threads
from shoal.host.processes import catches, driver_files, kill, process_tree
from shoal.programs.main import main_of_fork
from shoal.programs.memory_limits import NO_LIMITS, MemoryLimits
from shoal.programs.opaque import Command, Function, Opaque

__all__ = ["ProgramProcess", "UsageMonitor", "program_environment", "program_profile", "visible_device"]

_BOOTSTRAP = (
    "import pickle, sys; sys.path[:], sys.argv[:] = pickle.load(sys.stdin.buffer); "
    "from shoal.programs.main import main; main()"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def program_environment(trial: Trial, device: Device, address: str, directory: Path, step: int) -> dict[str, str]:
    """Return the environment variables for a program that sees this device only, at the checkpoint of a step."""
    return {
        **os.environ,
        **dict.fromkeys(_THREADS, str(threads(device.cores))),
        "CUDA_VISIBLE_DEVICES": visible_device(device),
        "PYTHONUNBUFFERED": "1",  # else lines of output are buffered
        "SHOAL_REPORT": address,
        "SHOAL_CHECKPOINT": str(directory),
        "SHOAL_STEP": str(step),
        "SHOAL_TRIAL": str(trial.number),
        "SHOAL_SEED": str(trial.seed),
    }


def visible_device(device: Device) -> str:
    """Return `CUDA_VISIBLE_DEVICES` for a program that may use only this device; "" for a slot of the CPU."""
    if not device.is_cuda:
        return ""
    if device.uuid:
        return device.uuid
    index = int(device.name.removeprefix("cuda:"))
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if mine is None else mine.split(",")[index].strip()


class ProgramProcess:
    """Running program, with the processes that it starts.

    In a worker of the fork server without an open GPU driver, a function runs in a fork, so modules are not imported
    again. Such a worker runs no user code, and no threads but those of its connection, which hold no lock that the fork
    takes. Else a function runs in a new process.
    """

    def __init__(
        self,
        training: Opaque,
        trial: Trial,
        environment: Mapping[str, str],
        output: BinaryIO,
        log: BinaryIO,
        directory: Path,
        limits: MemoryLimits = NO_LIMITS,
    ) -> None:
        self.inherited_memory = 0
        if isinstance(training, Function):
            environment = {**environment, **limits.variables()}
        self._process: subprocess.Popen[bytes] | BaseProcess
        if isinstance(training, Command):
            self._process = subprocess.Popen(
                training.line(trial, directory),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                cwd=training.directory,
                env=environment,
                preexec_fn=limits.before_exec(),
            )
        elif _may_fork(log):
            memory = psutil.Process().memory_info()
            self.inherited_memory = memory.rss - memory.shared
            fork = multiprocessing.get_context("fork")
            self._process = fork.Process(
                target=main_of_fork, args=(training.content, dict(trial.config), environment), name="MainProcess"
            )
            self._process.start()
        else:
            self._process = _new_process(training, trial, environment, output, log)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._tree: list[psutil.Process] = []

    def status(self) -> int | None:
        """Return the exit status as in `subprocess`; None while the program runs."""
        return self._process.exitcode if isinstance(self._process, BaseProcess) else self._process.poll()

    def tree(self) -> list[psutil.Process]:
        """Return the processes of the program; once it has ended, those of the last call before."""
        if self.status() is None:  # else its id may belong to another process
            self._tree = process_tree(self.pid) or self._tree
        return self._tree

    def request_end(self) -> bool:
        """Send SIGUSR1 to the first process if all of the program's handle it; return whether it was sent.

        A wrapper would pass it on to a process without a handler, which it would kill. Forked processes have inherited
        the handler. Under Slurm nothing is sent: handlers such as Lightning's requeue the whole Slurm job.
        """
        tree = self.tree()
        if "SLURM_JOB_ID" in os.environ or not tree or not all(catches(x.pid, signal.SIGUSR1) for x in tree):
            return False
        os.kill(self.pid, signal.SIGUSR1)
        return True

    def terminate(self) -> None:
        """Send SIGTERM to the program."""
        self.tree()
        self._process.terminate()

    def kill_all(self) -> None:
        """Kill all processes of the program."""
        tree = self.tree()
        self._process.kill()
        if isinstance(self._process, BaseProcess):
            self._process.join()
        else:
            self._process.wait()
        kill(tree)


def _may_fork(log: BinaryIO) -> bool:
    """Return whether this process is a worker, which alone has its output in the log of its job, without a driver."""
    return sys.platform == "linux" and os.path.sameopenfile(1, log.fileno()) and not driver_files()


def _new_process(
    function: Function, trial: Trial, environment: Mapping[str, str], output: BinaryIO, log: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start a new process for a function."""
    with tempfile.TemporaryFile() as setup:
        paths: Sequence[str] = [entry or os.getcwd() for entry in sys.path]
        pickle.dump((paths, sys.argv), setup)
        pickle.dump((function.content, dict(trial.config)), setup)
        setup.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP], stdin=setup, stdout=output, stderr=log, env=environment
        )


INTERVAL_SECONDS = 0.5

REPORTED_GROWTH = 1.1
"""Growth factor of the memory after which a new profile is reported."""

_MIN_SHARE = 0.01

_MIN_SECONDS = 1e-6


def program_profile(seconds: float, memory: int, compute: float, cores: float) -> Profile:
    """Return the profile of a program, with each report as a step and as an epoch."""
    return Profile(
        {1: seconds}, 1, 0, base_memory=memory, member_memory=0, compute=compute, cores=cores, measured_members=1
    )


class UsageMonitor:
    """Samples the resource usage of a program's processes, without the main memory inherited from this process."""

    def __init__(self, tree: Callable[[], Sequence[psutil.Process]], device: Device, inherited_memory: int = 0) -> None:
        self._tree = tree
        self._device = device
        self._inherited_memory = inherited_memory
        self._gpu = _GpuUsage(device) if device.is_cuda else None
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


class _GpuUsage:
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
