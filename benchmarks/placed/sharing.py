"""How many jobs shared a slot at a time, and how long slots waited for the next one."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from statistics import median

from shoal.core.job import Purpose
from shoal.core.rows import JobRow

__all__ = ["gap", "side_by_side"]


def side_by_side(jobs: Sequence[JobRow]) -> int:
    """Return the largest number of trainings, of those that have ended, that a device held at a time."""
    changes: dict[str, list[tuple[float, int]]] = {}
    for job in jobs:
        if job.purpose is Purpose.TRAIN and job.ended is not None:
            changes.setdefault(job.device, []).extend([(job.started, 1), (job.ended, -1)])
    held = (accumulate(change for _, change in sorted(each)) for each in changes.values())  # ends before starts
    return max((most for each in held for most in each), default=0)


def gap(jobs: Sequence[JobRow]) -> float:
    """Return the median seconds from the end of a job to the start of the next one on its device; 0 without any."""
    ended: dict[str, float] = {}
    gaps = []
    for job in sorted(jobs, key=lambda job: job.started):
        if job.started >= ended.get(job.device, inf):
            gaps.append(job.started - ended[job.device])
        ended[job.device] = job.ended if job.ended is not None else inf
    return median(gaps or [0.0])
