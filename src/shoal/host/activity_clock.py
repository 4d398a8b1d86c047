"""The clock of a job: it divides the time of its process among activities."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shoal.core.activity import Activity

__all__ = ["ActivityClock", "during"]


class ActivityClock:
    """Divides the time of a job among activities.

    Time counts for the innermost activity, or for the usual one outside of all others. Time outside `running` counts
    for none. The clock is read when an activity begins and when it ends.
    """

    def __init__(self, usual: Activity, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[Activity, float] = {}
        """Seconds by activity so far."""
        self._clock = clock
        self._stack = [usual]
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The job runs within, so that `during` refers to this clock."""
        _clocks.append(self)
        self._since = self._clock()
        try:
            yield
        finally:
            self._charge()
            _clocks.remove(self)

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Within, time counts for the activity."""
        self._charge()
        self._stack.append(activity)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        now = self._clock()
        self.seconds[self._stack[-1]] = self.seconds.get(self._stack[-1], 0.0) + now - self._since
        self._since = now


def during(activity: Activity) -> AbstractContextManager[None]:
    """Within, time of the job that runs in this process counts for the activity; without a job nothing happens."""
    return _clocks[-1].during(activity) if _clocks else nullcontext()


_clocks: list[ActivityClock] = []
"""Clocks of the jobs that run in this process now, the newest last.

Threads share the list: autograd runs backward passes, and so races of the autotuner, in its own threads while the job
waits."""
