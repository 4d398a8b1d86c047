"""Real steps of several arrays in one process, to see what they cost each other; nothing of it is kept."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from shoal.core.array import Array, Member
from shoal.core.demand import Profile
from shoal.dry_run.result import Company
from shoal.pack.batches import Batches
from shoal.pack.lanes import Failure, Round
from shoal.pack.memory import give_back
from shoal.pack.turns import Turns
from shoal.worker.lane import Lane
from shoal.worker.learner import Learner, wait
from shoal.worker.workshop import Workshop

__all__ = ["fetch_kept", "measure_company", "measure_switching"]

FETCH_SECONDS = 15.0
"""Spent at most on having samples at hand before anything is timed."""

LIMIT_SECONDS = 30.0
"""After these no way is chosen any more."""

STRETCHES, STRETCH_SECONDS = 5, 0.1
"""Pairs of one in the chosen way and one of lane after lane, and how long each takes at least."""

SWITCHES, SWITCH_SECONDS = 3, 2.0
"""Changes to an array that are timed, of long ones only as many as begin within these seconds."""


def fetch_kept(array: Array, workshop: Workshop) -> None:
    """Have the samples fetched that are kept from then on, as in all epochs but the first: fetching disturbs steps."""
    began = time.perf_counter()
    for each in workshop.sets.of(array.members[0].trial.config):
        if each.sharing == "kept" and each.fetched < each.samples:
            for _ in each.walk(array.key.batch_size):
                if time.perf_counter() - began > FETCH_SECONDS:
                    return


def measure_switching(array: Array, workshop: Workshop, step_seconds: float) -> float:
    """Seconds that a change to an array costs beside its steps and samples: building, moving, the first step (SwOH).

    Args:
        array: that was measured on the device already, so that all it uses is loaded.
        workshop: of this process.
        step_seconds: of any later step.
    """
    data = _Data.of(array, workshop)
    seconds: list[float] = []
    while not seconds or (len(seconds) < SWITCHES and sum(seconds) < SWITCH_SECONDS):
        give_back(workshop.device)
        began, fetched = time.perf_counter(), data.seconds
        lane = _Unjudged("", _endless(array), workshop)
        lane.prepare()
        lane.advance()
        wait(workshop.device)
        seconds.append(time.perf_counter() - began - (data.seconds - fetched) - step_seconds)
    give_back(workshop.device)
    return max(0.0, median(seconds))


def measure_company(arrays: Sequence[Array], workshop: Workshop, limit: float = LIMIT_SECONDS) -> Company:
    """Let arrays take turns until the fastest way is found, and see what they then take.

    What is measured of their steps is without fetching, which is shared or not by what the data set is.

    Args:
        arrays: at least two, of the same data, with their profiles; all members from their very start.
        workshop: of this process.
        limit: seconds for the choice of the way.

    Raises:
        Exception: what the task raised.
    """
    data = _Data.of(arrays[0], workshop)
    together = _Together([_Unjudged("", _endless(array), workshop) for array in arrays], data, workshop.device)
    try:
        return together.measure(tuple(arrays), limit)
    finally:
        del together
        give_back(workshop.device)


@dataclass(frozen=True)
class _Data:
    """What lanes are fed from, and what that has cost."""

    train: Batches
    valid: Batches

    @classmethod
    def of(cls, array: Array, workshop: Workshop) -> "_Data":
        return cls(*workshop.sets.of(array.members[0].trial.config))

    @property
    def seconds(self) -> float:
        """Of fetching so far."""
        return self.train.fetch_seconds + self.valid.fetch_seconds

    @property
    def asked(self) -> int:
        """Samples of the training set that were in a batch."""
        return self.train.fetched - self.train.early

    @property
    def sample_seconds(self) -> float:
        """Of fetching a sample of the training set."""
        return self.train.fetch_seconds / max(1, self.train.fetched)


class _Unjudged(Lane):
    """A lane in which trials go on whatever their loss is: a step takes as long when it is no number. They go on beyond
    their budgets, too, where a schedule may have ended.
    """

    def _learner(self, member: Member) -> Learner:
        return replace(super()._learner(member), scheduler=None)

    def _judge(self, finite: Tensor) -> None:
        pass


class _Together:
    """Lanes that take turns, for a time."""

    def __init__(self, lanes: list[Lane], data: _Data, device: torch.device) -> None:
        self._lanes = lanes
        self._data = data
        self._device = device
        self._turns = Turns(device)

    def measure(self, arrays: tuple[Array, ...], limit: float) -> Company:
        deadline = time.perf_counter() + limit
        while self._turns.way is None:
            self._in_turns(lambda: time.perf_counter() >= deadline)
            if time.perf_counter() >= deadline:
                return Company(arrays)
        way = self._turns.way
        before = self._data.asked, self._position
        chosen = self._stretch(lambda: self._in_turns(lambda: False))
        fetches = self._fetches(*before)
        ratios = []
        for _ in range(STRETCHES if way != "turns" else 0):
            ratios.append(chosen / self._stretch(self._one_after_another))
            chosen = self._stretch(lambda: self._in_turns(lambda: False))
        pace = min(1.0, median(ratios)) if ratios else 1.0
        fetching = fetches * self._data.sample_seconds / len(self._lanes) if self._data.train.abreast else 0.0
        return Company(arrays, way, pace, chosen + fetching, fetches)

    @property
    def _position(self) -> int:
        return sum(lane.position for lane in self._lanes)

    def _fetches(self, asked: int, position: int) -> float:
        """How often a sample was fetched for all lanes since then, where it is fetched in every epoch."""
        if not self._data.train.abreast:
            return 1.0
        passed = (self._position - position) / len(self._lanes)
        return max(1.0, (self._data.asked - asked) / passed)

    def _in_turns(self, interrupted: Callable[[], bool]) -> None:
        self._check(self._turns.round(self._ready(), interrupted))

    def _ready(self) -> list[Lane]:
        """All lanes, those that have ended an epoch brought to the next one."""
        for lane in self._lanes:
            while not lane.ready:
                lane.prepare()
        return self._lanes

    def _one_after_another(self) -> None:
        """As far as a round leads, each lane in one go."""
        goal = min(lane.position for lane in self._lanes) + self._turns.span
        one = Round(self._ready(), lambda lane: lane.position, goal, lambda: False, lambda lane: lane.advance())
        one.run(None)
        self._check(one.failures)

    def _check(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            raise failure.error
        for lane in self._lanes:
            lane.events.clear()  # nobody waits for what they have to tell

    def _stretch(self, go_on: Callable[[], None]) -> float:
        """Seconds that a sample takes to go through a lane, without fetching."""
        wait(self._device)
        began, fetched, position = time.perf_counter(), self._data.seconds, self._position
        while time.perf_counter() - began < STRETCH_SECONDS or self._position == position:
            go_on()
            wait(self._device)
        seconds = time.perf_counter() - began - (self._data.seconds - fetched)
        return max(seconds, sys.float_info.epsilon) / (self._position - position)


def _endless(array: Array) -> Array:
    """The array with no end in sight, and never compiled: what is asked is what an epoch takes from the first step."""
    members = tuple(replace(member, target=sys.maxsize) for member in array.members)
    return replace(array, members=members, profile=None if array.profile is None else _uncompiled(array.profile))


def _uncompiled(profile: Profile) -> Profile:
    return replace(profile, compiled_gain={1: 1.0})
