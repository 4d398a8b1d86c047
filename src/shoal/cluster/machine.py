"""What a machine has, behind a protocol, so that tests can invent one."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from shoal.cluster.nvml import Listing, gpus, visible
from shoal.cluster.threads import threads
from shoal.cluster.torch_devices import Accelerator, torch_devices

__all__ = ["Machine", "ThisMachine", "control_group_limits"]


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
        """As of `shoal.cluster.threads`."""
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
