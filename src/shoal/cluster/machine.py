"""Cores, threads, memory and accelerators of a machine, behind a protocol, so that tests can invent one."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from shoal.cluster.nvml import Listing, gpus, visible
from shoal.core.errors import DeviceError

__all__ = ["Accelerator", "Machine", "ThisMachine", "control_group_limits", "threads", "torch_devices"]


@dataclass(frozen=True)
class Accelerator:
    """A device that is neither of NVIDIA's nor a CPU.

    Args:
        name: as torch calls it: "mps:0", "xpu:1".
        model: "Apple M2", "Intel(R) Data Center GPU Max 1100".
        memory: bytes that programs may hold.
    """

    name: str
    model: str
    memory: int


class Machine(Protocol):
    """What `discover` asks of a machine."""

    @property
    def name(self) -> str:
        """How the node is called in reasons and tables."""

    def cores(self) -> int:
        """CPU cores this process may use, at least 1."""

    def threads(self, cores: int) -> int:
        """Threads that a job on so many of its cores has, at least 1."""

    def memory(self) -> int:
        """Bytes of main memory this process may use."""

    def gpus(self) -> Listing:
        """The GPUs a CUDA program started now would see, in its order, or why there are none."""

    def accelerators(self, sort: str) -> Sequence[Accelerator]:
        """Other devices of a type of torch's, "mps" or "xpu"."""


@dataclass(frozen=True)
class ThisMachine:
    """The machine this process runs on, as far as its CPU affinity and its control group allow."""

    control_group: Path = Path("/sys/fs/cgroup")

    @property
    def name(self) -> str:
        """The host name."""
        return platform.node() or "localhost"

    def cores(self) -> int:
        """Cores of the CPU affinity, cut to the control group's quota."""
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        quota, _ = control_group_limits(self.control_group)
        return allowed if quota is None else max(1, min(allowed, int(quota)))

    def threads(self, cores: int) -> int:
        """As of `shoal.cluster.machine`."""
        return threads(cores)

    def memory(self) -> int:
        """Main memory, cut to the control group's limit."""
        total = int(psutil.virtual_memory().total)
        _, limit = control_group_limits(self.control_group)
        return total if limit is None else min(total, limit)

    def gpus(self) -> Listing:
        """What NVML lists and `CUDA_VISIBLE_DEVICES` leaves."""
        return visible(gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def accelerators(self, sort: str) -> Sequence[Accelerator]:
        """What torch lists; it is not asked for Apple's devices on a machine that is not Apple's."""
        if sort == "mps" and (platform.system(), platform.machine()) != ("Darwin", "arm64"):
            return ()
        return torch_devices(sort)


def control_group_limits(root: Path) -> tuple[float | None, int | None]:
    """The limits of a control group, version 2, as a container sees its own.

    Args:
        root: where its files are; nothing there means no limit.

    Returns:
        (cores, bytes); None where there is no limit.
    """
    cores = memory = None
    if (file := root / "cpu.max").exists():
        quota, period = file.read_text().split()
        cores = None if quota == "max" else int(quota) / int(period)
    if (file := root / "memory.max").exists():
        text = file.read_text().strip()
        memory = None if text == "max" else int(text)
    return cores, memory


def threads(cores: int) -> int:
    """As many as a device has cores, but no more than `OMP_NUM_THREADS` allows, read as torch itself reads it."""
    allowed = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores, max(1, int(allowed))) if allowed.isdecimal() else cores


_QUESTIONS = {
    "mps": "[(torch.backends.mps.get_name(), torch.mps.recommended_max_memory())] "
    "if torch.backends.mps.is_available() else []",
    "xpu": "[(torch.xpu.get_device_name(i), torch.xpu.get_device_properties(i).total_memory) "
    "for i in range(torch.xpu.device_count())]",
}
"""By type, an expression that lists the model and the bytes of each device."""


def torch_devices(sort: str) -> tuple[Accelerator, ...]:
    """The devices of a type, "mps" or "xpu"; takes as long as an import of torch.

    Raises:
        DeviceError: torch cannot be asked.
    """
    code = f"import json, torch; print(json.dumps({_QUESTIONS[sort]}))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise DeviceError(f"torch cannot be asked for devices of type {sort!r}: {why}; use devices='cpu'")
    found = json.loads(asked.stdout.splitlines()[-1])
    return tuple(Accelerator(f"{sort}:{index}", *each) for index, each in enumerate(found))
