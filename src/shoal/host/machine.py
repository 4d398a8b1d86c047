"""Cores, threads, memory and accelerators of a machine, behind a protocol that tests can implement.

On Linux also the thread pools of the native libraries that this process has loaded.
"""

import ctypes
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from shoal.core.errors import DeviceError
from shoal.host.file_system import kernel_lines
from shoal.host.nvml import Listing, gpus, visible_gpus

__all__ = [
    "Accelerator",
    "Machine",
    "ThisMachine",
    "control_group_limits",
    "cpu_model",
    "limit_threads",
    "openblas_libraries",
    "openmp_libraries",
    "threads",
    "torch_devices",
]

_OPENMP = re.compile(r"/lib(g|i)?omp[^/]*\.so[^/]*$")
_OPENBLAS = re.compile(r"openblas[^/]*\.so[^/]*$")
_OPENBLAS_SETTERS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


def limit_threads(count: int) -> None:
    """Set the number of threads of torch, OpenMP and OpenBLAS, as their environment variables do at their import."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    setters = [(path, ["omp_set_num_threads"]) for path in openmp_libraries()]  # a tool of OpenMP does not have it
    setters += [(path, _OPENBLAS_SETTERS) for path in openblas_libraries()]
    for path, names in setters:
        library = ctypes.CDLL(path)
        for name in names:
            if hasattr(library, name):
                getattr(library, name)(count)


def openmp_libraries() -> list[str]:
    """Return the paths of the loaded libraries of OpenMP."""
    return [*filter(_OPENMP.search, _libraries())]


def openblas_libraries() -> list[str]:
    """Return the paths of the loaded libraries of OpenBLAS."""
    return [*filter(_OPENBLAS.search, _libraries())]


def _libraries() -> set[str]:
    """Return the paths of all shared libraries, without those that were replaced on disk, which cannot be loaded."""
    columns = (line.split(maxsplit=5) for line in kernel_lines("/proc/self/maps"))
    return {line[5] for line in columns if len(line) == 6 and ".so" in line[5] and not line[5].endswith(" (deleted)")}


@dataclass(frozen=True)
class Accelerator:
    """A device of Apple or Intel, which only torch finds.

    Args:
        name: Torch's name: "mps:0", "xpu:1".
        model: "Apple M2", "Intel(R) Data Center GPU Max 1100".
        memory: Memory for programs, in bytes.
    """

    name: str
    model: str
    memory: int


class Machine(Protocol):
    """The properties of a machine that `discover` reads."""

    @property
    def name(self) -> str:
        """Name of the node in reasons and tables."""

    def cores(self) -> int:
        """Return the number of CPU cores this process may use, at least 1."""

    def threads(self, cores: int) -> int:
        """Return the number of threads of a job on so many cores, at least 1."""

    def memory(self) -> int:
        """Return the main memory this process may use, in bytes."""

    def gpus(self) -> Listing:
        """Return the GPUs visible to a new CUDA program, in CUDA's order, or the reason why there are none."""

    def accelerators(self, device_type: str) -> Sequence[Accelerator]:
        """Return the devices of a type of torch, "mps" or "xpu"."""


@dataclass(frozen=True)
class ThisMachine:
    """The machine of this process, within the limits of its CPU affinity and its control group."""

    control_group: Path = Path("/sys/fs/cgroup")
    most_cores: int | None = None

    @property
    def name(self) -> str:
        """The host name."""
        return platform.node() or "localhost"

    def cores(self) -> int:
        """Return the cores of the CPU affinity, at most the control group's quota."""
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        quota, _ = control_group_limits(self.control_group)
        limits = [allowed, *(int(limit) for limit in (quota, self.most_cores) if limit is not None)]
        return max(1, min(limits))

    def threads(self, cores: int) -> int:
        """Return the result of the function `threads` of this module."""
        return threads(cores)

    def memory(self) -> int:
        """Return the main memory, at most the control group's limit."""
        total = int(psutil.virtual_memory().total)
        _, limit = control_group_limits(self.control_group)
        return total if limit is None else min(total, limit)

    def gpus(self) -> Listing:
        """Return the GPUs of NVML that `CUDA_VISIBLE_DEVICES` leaves visible."""
        return visible_gpus(gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def accelerators(self, device_type: str) -> Sequence[Accelerator]:
        """Return the devices that torch lists; Apple's only on Apple's machines, as importing torch takes long."""
        if device_type == "mps" and (platform.system(), platform.machine()) != ("Darwin", "arm64"):
            return ()
        return torch_devices(device_type)


def control_group_limits(root: Path) -> tuple[float | None, int | None]:
    """Return the cores and bytes of a control group, version 2, as in a container; None where no file sets a limit."""
    cores = memory = None
    if (file := root / "cpu.max").exists():
        quota, period = file.read_text().split()
        cores = None if quota == "max" else int(quota) / int(period)
    if (file := root / "memory.max").exists():
        text = file.read_text().strip()
        memory = None if text == "max" else int(text)
    return cores, memory


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, that of its name first and the loopback last."""
    interfaces = psutil.net_if_stats()
    found = [
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and interfaces[name].isup and not each.address.startswith("127.")
    ]
    with suppress(OSError):  # the name has no address
        named = socket.gethostbyname(socket.gethostname())
        found.sort(key=lambda address: address != named)
    return [*found, "127.0.0.1"]


def threads(cores: int) -> int:
    """Return the number of threads of a job: `cores`, at most `OMP_NUM_THREADS`, which is read as by torch."""
    allowed = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores, max(1, int(allowed))) if allowed.isdecimal() else cores


def cpu_model() -> str:
    """Return the model of this machine's CPU: "AMD EPYC 7763 64-Core Processor"; "" if it is unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


_TORCH_QUERIES = {
    "mps": "[(torch.backends.mps.get_name(), torch.mps.recommended_max_memory())] "
    "if torch.backends.mps.is_available() else []",
    "xpu": "[(torch.xpu.get_device_name(i), torch.xpu.get_device_properties(i).total_memory) "
    "for i in range(torch.xpu.device_count())]",
}
"""For each type, an expression that lists the model and the memory (bytes) of each device."""


def torch_devices(device_type: str) -> tuple[Accelerator, ...]:
    """List the devices of a type in a process of its own, as the core imports no torch, whose import takes long."""
    code = f"import json, torch; print(json.dumps({_TORCH_QUERIES[device_type]}))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if completed.returncode:
        why = (completed.stderr.strip().splitlines() or [f"exit status {completed.returncode}"])[-1]
        raise DeviceError(f"torch cannot be asked for devices of type {device_type!r}: {why}; use devices='cpu'")
    found = json.loads(completed.stdout.splitlines()[-1])
    return tuple(Accelerator(f"{device_type}:{index}", *each) for index, each in enumerate(found))
