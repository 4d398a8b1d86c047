"""Chooses by measurement whether steps use the cores of idle slots as further threads."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.activity import Activity
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.cost.activity_clock import during
from shoal.cost.estimate import thread_gain
from shoal.cost.race import Race, RaceRules

__all__ = ["MIN_STEPS", "ThreadChoice"]

RULES = RaceRules(min_runs=6, max_runs=6, margin=1.05)
"""Two bursts of each number of threads. Fewer threads win a tie, since further ones may disturb other programs."""

MIN_STEPS = 64
"""Remaining steps of an array from which more threads are tried: four times the steps of a race."""


class ThreadChoice:
    """Chooses the number of threads of the steps of a job: those of its slot, or all that it may use at present.

    Small steps lose by a second thread, and products of large matrices gain. So both are timed in training, for each
    structure and number of members, unless the profile shows which is faster. The number of threads changes the order
    of sums, and so the last bits of results.

    Args:
        own: Number of threads of the slot.
        clock: Clock in seconds.
    """

    def __init__(self, own: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._own = self._current = self._allowed = own
        self._clock = clock
        self._races: dict[tuple[FusionKey, int, int], Race[int]] = {}

    def allow(self, threads: int) -> None:
        """Allow so many threads from the next step on."""
        self._allowed = threads

    def use_own(self) -> None:
        """Use the threads of the slot until the next step."""
        self._use(self._own)

    @contextmanager
    def chosen(self, key: FusionKey, profile: Profile | None, batches: Sequence[Any], left: int) -> Iterator[None]:
        """Context manager for one step, which runs with the chosen number of threads and may be timed.

        Args:
            key: Key of the array.
            profile: Profile of the key, or None.
            batches: Batch of each member.
            left: Number of remaining steps of the first member.
        """
        race = self._race(key, profile, len(batches), left) if self._allowed > self._own else None
        self._use(self._own if race is None else race.next)
        if race is None or race.winner is not None:
            yield
            return
        began = self._clock()
        with during(Activity.TIMED_STEPS):
            yield
        race.note(self._clock() - began, _elements(batches[0]))

    def gains(self, key: FusionKey) -> Mapping[int, Mapping[int, float]]:
        """Return the measured gains of a key, as `Profile.thread_gain`."""
        found: dict[int, dict[int, float]] = {}
        for (raced_key, members, threads), race in self._races.items():
            if raced_key == key and race.winner is not None and {self._own, threads} <= race.seconds.keys():
                found.setdefault(threads, {})[members] = race.seconds[self._own] / race.seconds[threads]
        return found

    def _race(self, key: FusionKey, profile: Profile | None, members: int, left: int) -> Race[int] | None:
        """Return the race, open or finished, of steps of so many members; None if too few steps remain for one."""
        name = key, members, self._allowed
        if name not in self._races:
            gain = None if profile is None else thread_gain(profile, self._allowed, members)
            if gain is None and left < MIN_STEPS:
                return None
            race = self._races[name] = Race((self._own, self._allowed), RULES)
            if gain is not None:
                if gain >= RULES.margin:
                    race.drop(self._own)
                race.stop()
        return self._races[name]

    def _use(self, threads: int) -> None:
        if threads != self._current:
            torch.set_num_threads(threads)
            self._current = threads


def _elements(batch: Any) -> int:
    """Return the number of elements of all tensors of a batch, by which batches of different lengths are compared."""
    return max(1, sum(leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)))
