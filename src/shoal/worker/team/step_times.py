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
        self.note = ""
        """Reason why the steps are not divided; "" if they are."""
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WARM_UP + COUNTED))
        self._estimates: deque[float] = deque(maxlen=COUNTED)
        self._reported: tuple[frozenset[int], str] = (frozenset(), "")

    def add(self, size: int, seconds: float) -> None:
        """Add the time of a step of so many devices."""
        self._seconds[size].append(seconds)

    def add_estimate(self, seconds: float) -> None:
        """Add the time of a step on one device that counts while no others are known."""
        self._estimates.append(seconds)

    def seconds(self, size: int) -> float | None:
        """Median seconds of a step of so many devices; None while unknown."""
        found = self._seconds[size]
        if len(found) == WARM_UP + COUNTED:
            return median(list(found)[WARM_UP:])
        return min(self._estimates, default=None) if size == 1 else None

    def news(self, job: str, key: FusionKey, members: int) -> list[TeamMeasured]:
        """An event with all times, if there is a new size or a note."""
        known = {size: found for size in list(self._seconds) if (found := self.seconds(size)) is not None}
        alone = self.seconds(1)
        state = frozenset(known), self.note
        if alone is None or state == self._reported or (not self.note and known.keys() <= {1}):
            return []
        self._reported = state
        return [TeamMeasured(job, key, members, {1: alone} if self.note else {1: alone, **known}, self.note)]
