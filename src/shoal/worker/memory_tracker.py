"""How much memory a training job takes, as far as its process can see."""

from collections.abc import Iterable

import psutil
import torch

from shoal.core.array import FusionKey
from shoal.core.event import MemoryMeasured
from shoal.worker.array_trainer import ArrayTrainer

__all__ = ["MemoryTracker"]

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

    def look(self, lanes: Iterable[ArrayTrainer]) -> None:
        """See what the process holds while it trains these."""
        for lane in lanes:
            self._members[lane.key] = max(self._members.get(lane.key, 0), len(lane.models))
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
