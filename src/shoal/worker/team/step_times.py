"""Seconds of a training step by the number of devices."""

from collections import defaultdict, deque
from statistics import median

from shoal.core.array import FusionKey
from shoal.core.event import TeamMeasured

__all__ = ["StepTimes"]

WARM_UP = 3
"""Number of steps of each size that are not counted: memory is allocated, and caches are cold."""
COUNTED = 5
"""Number of steps of which the median counts."""


class StepTimes:
    """Times of the steps of one array, as they are reported once each size has been measured."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WARM_UP + COUNTED))
        self._reported: frozenset[int] = frozenset()

    def add(self, size: int, seconds: float) -> None:
        """Add the time of a step of so many devices."""
        self._seconds[size].append(seconds)

    def seconds(self, size: int) -> float | None:
        """Median seconds of a step of so many devices; None while unknown."""
        found = self._seconds[size]
        return median(list(found)[WARM_UP:]) if len(found) == WARM_UP + COUNTED else None

    def news(self, job: str, key: FusionKey, members: int) -> list[TeamMeasured]:
        """An event with all times, if a size other than 1 has been measured since the last one."""
        times = {size: found for size in list(self._seconds) if (found := self.seconds(size)) is not None}
        if 1 not in times or times.keys() <= self._reported | {1}:
            return []
        self._reported = frozenset(times)
        return [TeamMeasured(job, key, members, times)]
