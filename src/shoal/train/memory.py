"""Device memory of a training job: measures the peak, and frees memory when an array ends."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from shoal.core.array import FusionKey
from shoal.core.event import MemoryMeasured
from shoal.host.processes import own_memory

__all__ = ["MemoryMeter", "MemoryTracker", "fixed_bytes", "limit_memory", "release_cached_memory"]

REPORTED_GROWTH = 1.05
"""Growth factor of the peak after which the peak is reported again, as it is for new members."""


T = TypeVar("T")


class MemoryMeter:
    """Counts bytes on a device: those of live tensors on a GPU, else those of this process (`own_memory`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        """Return the bytes in use."""
        return int(torch.cuda.memory_allocated(self._device)) if self._device.type == "cuda" else own_memory()

    def during(self, step: Callable[[], T]) -> tuple[T, int]:
        """Call a function; return its result, and the bytes that it adds at its peak, on a CPU those that it leaves."""
        before = self.used()
        if self._device.type != "cuda":
            return step(), own_memory() - before
        torch.cuda.reset_peak_memory_stats(self._device)
        return step(), int(torch.cuda.max_memory_allocated(self._device)) - before


class MemoryTracker:
    """Tracks the peak memory of this process while it trains.

    On a GPU the peak is the memory that torch has reserved. On a CPU it is the maximum of the resident set over all
    calls of `sample`, without memory shared with the parent process.
    """

    def __init__(self, job: str, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._members: dict[FusionKey, int] = {}
        self._bytes = 0
        self._reported: tuple[int, dict[FusionKey, int]] = (0, {})
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def sample(self, arrays: Iterable[tuple[FusionKey, int]], waiting: int = 0) -> None:
        """Measure the memory with these arrays in training, as keys and numbers of members.

        Args:
            waiting: Bytes of trials on the device that wait to be trained, which are not counted.
        """
        training = Counter[FusionKey]()
        for key, members in arrays:
            training[key] += members
        self._members |= {key: max(self._members.get(key, 0), members) for key, members in training.items()}
        used = int(torch.cuda.max_memory_reserved(self._device)) if self._device.type == "cuda" else own_memory()
        self._bytes = max(self._bytes, used - waiting)

    def new_peak(self) -> MemoryMeasured | None:
        """Return the peak, if it has grown since it was last reported; else None."""
        members = {key: count for key, count in self._members.items() if count}
        reported, reported_members = self._reported
        if not members or (self._bytes <= REPORTED_GROWTH * reported and members == reported_members):
            return None
        self._reported = self._bytes, members
        return MemoryMeasured(self._job, members, self._bytes)


def fixed_bytes(lone: int, array: int, members: int) -> int:
    """Return the bytes of a step that do not grow with its members, by those of a lone member and of an array."""
    return max(0, lone * members - array) // (members - 1) if members > 1 else 0


def limit_memory(device: torch.device, limit: int) -> None:
    """Limit the bytes of a GPU that torch may reserve in this process; 0: no limit. Torch raises an error beyond it.

    The limit does not include the CUDA context. It applies to a job beside others, with and without MPS.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total) if limit else 1.0, device)


def release_cached_memory(device: torch.device) -> None:
    """Free the unused memory that torch has reserved on a GPU."""
    if device.type == "cuda":
        gc.collect()  # an array is a reference cycle
        torch.cuda.empty_cache()
