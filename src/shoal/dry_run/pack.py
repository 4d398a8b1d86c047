"""Real steps of several arrays in one process, to see what they cost each other; nothing of it is kept."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shoal.core.array import Array, Member
from shoal.pack.memory import give_back
from shoal.pack.turns import Turns
from shoal.worker.lane import Lane
from shoal.worker.learner import Learner
from shoal.worker.workshop import Workshop

__all__ = ["measure_pace"]

LEAST_SECONDS, LIMIT_SECONDS = 0.5, 30.0
"""How long arrays take turns at least, so that what goes wrong shows; after the limit no way is chosen any more."""


def measure_pace(arrays: Sequence[Array], workshop: Workshop, limit: float = LIMIT_SECONDS) -> float:
    """Let arrays take turns until the fastest way is found, as a training job does.

    Args:
        arrays: at least two, of the same data, with their profiles; all members from their very start.
        workshop: of this process.
        limit: seconds for the choice of the way.

    Returns:
        Seconds of their steps in that way over those of array after array; 1 where there is no other way.

    Raises:
        Exception: what the task raised.
    """
    lanes = [_UnjudgedLane("", _endless(array), workshop) for array in arrays]
    turns = Turns(workshop.device)
    began = time.perf_counter()

    def elapsed() -> float:
        return time.perf_counter() - began

    while elapsed() < (LEAST_SECONDS if turns.way else limit):
        for lane in lanes:
            while not lane.ready:
                lane.prepare()
        for failure in turns.round(lanes, lambda: elapsed() >= limit):
            raise failure.error
        for lane in lanes:
            lane.events.clear()  # nobody waits for what they have to tell
    seconds, way = turns.seconds, turns.way
    del lanes, turns
    give_back(workshop.device)
    return seconds[way] / seconds["turns"] if way is not None and "turns" in seconds else 1.0


class _UnjudgedLane(Lane):
    """A lane in which trials go on whatever their loss is: a step takes as long when it is no number. They go on beyond
    their budgets, too, where a schedule may have ended.
    """

    def _learner(self, member: Member) -> Learner:
        return replace(super()._learner(member), scheduler=None)

    def _judge(self, finite: Tensor) -> None:
        pass


def _endless(array: Array) -> Array:
    """The array with no end in sight, and never compiled: what is asked is what an epoch takes from the first step."""
    members = tuple(replace(member, target=sys.maxsize) for member in array.members)
    profile = None if array.profile is None else replace(array.profile, compiled_gain={1: 1.0})
    return replace(array, members=members, profile=profile)
