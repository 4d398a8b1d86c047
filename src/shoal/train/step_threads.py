"""Threads of training steps on a CPU: those of the job's slot, and of idle slots where these make steps faster."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from shoal.core.activity import Activity
from shoal.fuse.race import Race, RaceRules
from shoal.host.activity_clock import during

__all__ = ["JobThreads", "StepThreads"]

T = TypeVar("T")

RULES = RaceRules(margin=1.03)
"""More threads have to gain more than noise."""


@dataclass
class JobThreads:
    """Threads of a job: those of its slot, and the most that it may use, with cores that idle slots lend to it."""

    own: int = 1
    most: int = 1

    def begin(self) -> None:
        """Begin a job with the present threads of torch."""
        self.own = self.most = torch.get_num_threads()


class StepThreads:
    """Threads of the steps of one array.

    Once its fastest kind of step is known, and while the job may use more threads than those of its slot, bursts of
    steps alternate between these, twice as many, and so on, until it is known which are fastest. A small model may lose
    by more threads. All else, such as the choice between kinds of steps, has the threads of the slot, so that its
    measurements hold for other jobs.

    Args:
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, threads: JobThreads, clock: Callable[[], float] = time.perf_counter) -> None:
        self._threads = threads
        self._clock = clock
        self._most = threads.own
        self._race = Race((threads.own,))

    def take(self, step: Callable[[], T], samples: int, settled: bool) -> T:
        """Take a step on so many samples; `settled` if it is of the fastest kind."""
        if not settled:
            with during(Activity.TIMED_STEPS):
                return step()
        own, most = self._threads.own, self._threads.most
        if most <= own:
            return step()
        if most != self._most:
            doubled = [own << power for power in range((most - 1) // own) if own << power < most]
            self._most, self._race = most, Race((*doubled, most), RULES)
        began = self._clock()
        torch.set_num_threads(self._race.next)
        try:
            result = step()
        finally:
            torch.set_num_threads(own)
        self._race.note(self._clock() - began, samples)
        return result
