"""Figures of each way of getting the jobs done."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

__all__ = ["Figures", "middle"]


@dataclass(frozen=True)
class Figures:
    """Figures of one run.

    Args:
        makespan: Seconds from the call to the last result.
        occupancy: Mean part of the devices' compute that was reserved for jobs.
        sampling: Part of the devices' busy seconds in which models were inspected and measured.
        jobs: Number of jobs that trained; one may train several configurations.
        side_by_side: Largest number of trainings that a device held at a time.
        gap: Median milliseconds from the end of a job to the start of the next one on its device.
        failed: Configurations that were not trained to their end.
    """

    makespan: float
    occupancy: float
    sampling: float
    jobs: float
    side_by_side: float
    gap: float
    failed: float


def middle(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    return Figures(*(median(getattr(run, field.name) for run in runs) for field in fields(Figures)))
