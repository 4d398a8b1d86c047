"""How many jobs shared a slot at a time, for how long slots held any, and how long they waited for the next one."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from statistics import median

from shoal.core.job import Purpose
from shoal.core.rows import JobRow

__all__ = ["busy_seconds", "gap", "side_by_side"]


def side_by_side(jobs: Sequence[JobRow]) -> int:
    """Return the largest number of trainings that a device held at a time; 0 without any."""
    return max((held for held, _ in _stretches(jobs)), default=0)


def busy_seconds(jobs: Sequence[JobRow]) -> float:
    """Return the seconds of all devices in which they held a training."""
    return sum(seconds for held, seconds in _stretches(jobs) if held)


def gap(jobs: Sequence[JobRow]) -> float:
    """Return the median seconds from the end of a job to the start of the next one on its device; 0 without any."""
    ended: dict[str, float] = {}
    gaps = []
    for job in sorted(jobs, key=lambda job: job.started):
        if job.started >= ended.get(job.device, inf):
            gaps.append(job.started - ended[job.device])
        ended[job.device] = job.ended if job.ended is not None else inf
    return median(gaps or [0.0])


def _stretches(jobs: Sequence[JobRow]) -> Iterator[tuple[int, float]]:
    """Yield how many trainings a device held, and for how many seconds, between any two changes; of jobs that have
    ended.
    """
    changes: dict[str, list[tuple[float, int]]] = {}
    for job in jobs:
        if job.purpose is Purpose.TRAIN and job.ended is not None:
            changes.setdefault(job.device, []).extend([(job.started, 1), (job.ended, -1)])
    for of_device in changes.values():
        held = 0
        for (at, change), (until, _) in pairwise(sorted(of_device)):  # at the same time, ends come first
            held += change
            yield held, until - at
