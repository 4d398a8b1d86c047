"""Limits of the memory of a program: set before it allocates, by the worker for a command, by itself for a function."""

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from shoal.core.device import Device
from shoal.core.event import Outcome
from shoal.core.job import Job

__all__ = ["NO_LIMITS", "MemoryLimits", "limit_gpu_memory", "limit_main_memory"]

_BYTES, _FRACTION = "SHOAL_PROCESS_MEMORY", "SHOAL_GPU_FRACTION"


@dataclass(frozen=True)
class MemoryLimits:
    """The limits of the program of one trial.

    Args:
        process: Bytes of main memory that each of its processes may allocate (RLIMIT_DATA, which spares shared memory
            and the address space that CUDA reserves); 0: no limit.
        gpu_fraction: Part of the memory of its GPU that torch may reserve in a function; 1: no limit.
    """

    process: int = 0
    gpu_fraction: float = 1.0

    @classmethod
    def of(cls, job: Job, device: Device, process: int) -> "MemoryLimits":
        """The limits of a job; a client of MPS has that of its GPU already."""
        limited = device.is_cuda and job.memory_limit and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        return cls(process, min(1.0, job.memory_limit / device.memory) if limited else 1.0)

    def variables(self) -> dict[str, str]:
        """The environment variables from which a function's process reads them."""
        main = {_BYTES: str(self.process)} if self.process else {}
        return main | ({_FRACTION: str(self.gpu_fraction)} if self.gpu_fraction < 1 else {})

    def before_exec(self) -> Callable[[], None] | None:
        """The call that limits the process of a command between fork and exec; of C alone, so safe beside threads."""
        if not self.process:
            return None
        return partial(resource.setrlimit, resource.RLIMIT_DATA, (self.process, self.process))

    def reason(self, name: str, outcome: Outcome, message: str) -> str | None:
        """Why a program that failed has exceeded its own limit of main memory; None if it failed otherwise."""
        if not self.process or outcome is not Outcome.OUT_OF_MEMORY or "CUDA" in message:
            return None
        return (
            f"{name} exceeded its own limit of {_limit_text(self.process)} in a process; if it needs more, raise that "
            f"(memory_limit=, --memory-limit)\n{message}"
        )


NO_LIMITS = MemoryLimits()


def limit_main_memory() -> None:
    """Limit what this process of a function allocates from now on, beside what it has inherited by a fork."""
    if limit := int(os.environ.pop(_BYTES, 0)):
        total = psutil.Process().memory_info().data + limit
        resource.setrlimit(resource.RLIMIT_DATA, (total, total))


def limit_gpu_memory() -> None:
    """Limit what torch, if the module of the function has imported it, reserves of its GPU.

    The limit is set when CUDA begins, before the first tensor: a process without one needs no context.
    """
    fraction = float(os.environ.pop(_FRACTION, 1))
    torch: Any = sys.modules.get("torch")
    if torch is not None and fraction < 1:
        torch.cuda._lazy_call(partial(torch.cuda.set_per_process_memory_fraction, fraction))


def _limit_text(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"
