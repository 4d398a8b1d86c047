"""Threads of training steps on a CPU: those of the job's slot, and of idle slots where these make steps faster."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from shoal.fuse.race import Race, RaceRules

__all__ = ["StepThreads"]

T = TypeVar("T")

RULES = RaceRules(margin=1.03)


class StepThreads:
    """Threads of the steps of a job, with cores that idle slots lend to it.

    Steps alternate between the threads of the slot and all threads until it is known which are faster. A small model
    may lose by more threads.

    Args:
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._own = 1
        self._race: Race[int] | None = None

    def begin(self) -> None:
        """Begin a job with the present threads of torch, which are those of its slot."""
        self._own, self._race = torch.get_num_threads(), None

    def allow(self, threads: int) -> None:
        """Allow steps so many threads, at least those of the slot."""
        torch.set_num_threads(self._own)
        self._race = Race((self._own, threads), RULES) if threads > self._own else None

    def take(self, step: Callable[[], T]) -> T:
        """Take a step of an array whose fastest kind of step is known."""
        if self._race is None:
            return step()
        torch.set_num_threads(self._race.next)
        began = self._clock()
        result = step()
        self._race.note(self._clock() - began)
        if (fastest := self._race.winner) is not None:
            torch.set_num_threads(fastest)
            self._race = None
        return result
