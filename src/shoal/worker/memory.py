"""Device memory of a training job: measured while it trains, and freed when an array ends."""

import gc
from collections.abc import Iterable

import psutil
import torch

from shoal.core.array import FusionKey
from shoal.core.event import MemoryMeasured

__all__ = ["MemoryTracker", "give_back"]

NEWS = 1.05
"""A peak is told of again when it has grown by this factor, or the arrays have."""


class MemoryTracker:
    """Watches the memory of this process while it trains.

    Of a GPU it is what torch has taken there, as in a profile; of the CPU the resident set, whenever it is looked at.

    Args:
        job: id of the job.
        device: where it trains.
    """

    def __init__(self, job: str, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._members: dict[FusionKey, int] = {}
        self._bytes = 0
        self._told: tuple[int, dict[FusionKey, int]] = (0, {})
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def look(self, arrays: Iterable[tuple[FusionKey, int]]) -> None:
        """Measure what the process holds.

        Args:
            arrays: Key and number of members of each array in training.
        """
        for key, members in arrays:
            self._members[key] = max(self._members.get(key, 0), members)
        if self._device.type == "cuda":
            self._bytes = int(torch.cuda.max_memory_reserved(self._device))
        else:
            self._bytes = max(self._bytes, int(psutil.Process().memory_info().rss))

    def news(self) -> MemoryMeasured | None:
        """What it has held at most, if that was not told yet."""
        members = {key: count for key, count in self._members.items() if count}
        told, told_members = self._told
        if not members or (self._bytes <= NEWS * told and members == told_members):
            return None
        self._told = self._bytes, members
        return MemoryMeasured(self._job, members, self._bytes)


def give_back(device: torch.device) -> None:
    """Let memory of a GPU that nobody refers to any more be used by others."""
    if device.type == "cuda":
        gc.collect()  # an array is a cycle
        torch.cuda.empty_cache()
