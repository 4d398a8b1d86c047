"""Chooses by measurement whether steps use the cores of idle slots as further threads."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
from shoal.worker.profile import delayed_seconds

__all__ = ["MIN_STEPS", "ThreadChoice"]

RULES = RaceRules(min_runs=6, max_runs=6, margin=1.05)
"""Two bursts of each number of threads. Fewer threads win a tie, since further ones may disturb other programs."""

SLOW_STEPS = 8
"""Steps in a row, each slower than one with the threads of the slot was, after which the numbers are timed again. Where
another program takes a core, a step with as many threads as cores waits for it: ten times as long was measured."""

MAX_DELAY = 0.1
"""Largest share of a race in which this thread waited for a core; with more, the gain is not kept for later jobs."""

MIN_STEPS = 64
"""Remaining steps of an array from which more threads are tried: four times the steps of a race."""


@dataclass
class _ThreadRace:
    """A race between numbers of threads."""

    race: Race[int]
    seconds: float = 0.0
    delayed: float = 0.0
    slow_steps: int = 0

    def is_slow(self, cost: float, own: int) -> bool:
        """Record the cost of a step after the race, won by more threads than the slot has; return whether the last
        steps all cost more than one with the threads of the slot."""
        self.slow_steps = self.slow_steps + 1 if cost > self.race.seconds[own] else 0
        return self.slow_steps >= SLOW_STEPS


class ThreadChoice:
    """Chooses the number of threads of the steps of a job: those of its slot, or all that it may use at present.

    Small steps lose by a second thread, and products of large matrices gain. So both are timed in training, for each
    structure and number of members, unless the profile shows that more threads are slower. The number of threads
    changes the order of sums, and so the last bits of results.

    Args:
        own: Number of threads of the slot.
        clock: Clock in seconds.
        delay: Function that returns the seconds that this thread has waited for a core so far.
    """

    def __init__(
        self,
        own: int,
        clock: Callable[[], float] = time.perf_counter,
        delay: Callable[[], float] = delayed_seconds,
    ) -> None:
        self._own = self._current = self._allowed = own
        self._clock, self._delay = clock, delay
        self._races: dict[tuple[FusionKey, int, int], _ThreadRace] = {}

    @property
    def borrows(self) -> bool:
        """Whether more threads are allowed than those of the slot."""
        return self._allowed > self._own

    def allow(self, threads: int) -> None:
        """Allow so many threads from the next step on."""
        self._allowed = threads

    def use_own(self) -> None:
        """Use the threads of the slot until the next step."""
        self._use(self._own)

    def start_anew(self, key: FusionKey) -> None:
        """Use the threads of the slot until the next step, and time the numbers for this key anew, since its new steps
        may be of another mode."""
        self.use_own()
        self._races = {name: timed for name, timed in self._races.items() if name[0] != key}

    @contextmanager
    def chosen(self, key: FusionKey, profile: Profile | None, batches: Sequence[Any], left: int) -> Iterator[None]:
        """Context manager for one step, which runs with the chosen number of threads and may be timed.

        Args:
            key: Key of the array.
            profile: Profile of the key, or None.
            batches: Batch of each member.
            left: Number of remaining steps of the first member.
        """
        timed = self._race(key, profile, len(batches), left) if self.borrows else None
        self._use(self._own if timed is None else timed.race.next)
        if timed is None or timed.race.winner == self._own:
            yield
            return
        began, delayed = self._clock(), self._delay() if timed.race.winner is None else 0.0
        with during(Activity.TIMED_STEPS) if timed.race.winner is None else nullcontext():
            yield
        seconds = self._clock() - began
        if timed.race.winner is None:
            timed.seconds += seconds
            timed.delayed += self._delay() - delayed
            timed.race.note(seconds, _elements(batches[0]))
        elif timed.is_slow(seconds / _elements(batches[0]), self._own):
            del self._races[key, len(batches), self._allowed]

    def gains(self, key: FusionKey) -> Mapping[int, Mapping[int, float]]:
        """Return the measured gains of a key, as `Profile.thread_gain`."""
        found: dict[int, dict[int, float]] = {}
        for (raced_key, members, threads), timed in self._races.items():
            race = timed.race
            undisturbed = race.winner is not None and timed.delayed <= MAX_DELAY * timed.seconds
            if raced_key == key and undisturbed and {self._own, threads} <= race.seconds.keys():
                found.setdefault(threads, {})[members] = race.seconds[self._own] / race.seconds[threads]
        return found

    def _race(self, key: FusionKey, profile: Profile | None, members: int, left: int) -> "_ThreadRace | None":
        """Return the race, open or finished, of steps of so many members; None if more threads are known to be slower,
        or if too few steps remain for a race."""
        name = key, members, self._allowed
        if name not in self._races:
            gain = None if profile is None else thread_gain(profile, self._allowed, members)
            if left < MIN_STEPS or (gain is not None and gain < RULES.margin):
                return None
            self._races[name] = _ThreadRace(Race((self._own, self._allowed), RULES))
        return self._races[name]

    def _use(self, threads: int) -> None:
        if threads != self._current:
            torch.set_num_threads(threads)
            self._current = threads


def _elements(batch: Any) -> int:
    """Return the number of elements of all tensors of a batch, by which batches of different lengths are compared."""
    return max(1, sum(leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)))
