"""What is measured of each way of getting the jobs done."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

__all__ = ["Figures", "middle"]


@dataclass(frozen=True)
class Figures:
    """Of one run.

    Args:
        makespan: seconds from the call to the last result.
        occupancy: mean part of the devices' compute that was reserved for jobs.
        device_seconds: in which devices had jobs, whatever these did.
        looking: of those, seconds in which models were looked at, with the start of the processes that do it.
        profiling: of those, seconds in which models were measured.
        jobs: processes' pieces of work that trained; one may train several configurations.
        failed: configurations that were not trained to their end.
    """

    makespan: float
    occupancy: float
    device_seconds: float
    looking: float
    profiling: float
    jobs: float
    failed: float


def middle(runs: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return Figures(*(median(getattr(run, field.name) for run in runs) for field in fields(Figures)))
