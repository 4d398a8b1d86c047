"""Real steps of several arrays in one process, to see what they cost each other; nothing of it is kept."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from shoal.core.array import Array
from shoal.worker.array_trainer import ArrayTrainer
from shoal.worker.lane_scheduler import LaneScheduler
from shoal.worker.memory import give_back
from shoal.worker.worker_state import WorkerState

__all__ = ["measure_pack_speed"]

LEAST_SECONDS, LIMIT_SECONDS = 0.5, 30.0
"""How long arrays take turns at least, so that what goes wrong shows; after the limit no way is chosen any more."""


def measure_pack_speed(arrays: Sequence[Array], worker_state: WorkerState, limit: float = LIMIT_SECONDS) -> float:
    """Let arrays take turns until the fastest way is found, as a training job does.

    Args:
        arrays: at least two, of the same data, with their profiles; all members from their very start.
        worker_state: of this process.
        limit: seconds for the choice of the way.

    Returns:
        Seconds of their steps in that way over those of array after array; 1 where there is no other way.

    Raises:
        Exception: what the task raised.
    """
    lanes = [ArrayTrainer("", _endless(array), worker_state, timing_only=True) for array in arrays]
    turns = LaneScheduler(worker_state.device)
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
    give_back(worker_state.device)
    return seconds[way] / seconds["turns"] if way is not None and "turns" in seconds else 1.0


def _endless(array: Array) -> Array:
    """The array with no end in sight, and never compiled: what is asked is what an epoch takes from the first step."""
    members = tuple(replace(member, target=sys.maxsize) for member in array.members)
    profile = None if array.profile is None else replace(array.profile, compiled_gain={1: 1.0})
    return replace(array, members=members, profile=profile)
