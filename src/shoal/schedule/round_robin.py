"""Turns for all: who waited longest is next."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import final

from shoal.schedule.base import JobView
from shoal.schedule.time_sharing import TimeSharing

__all__ = ["RoundRobin"]


@final
@dataclass(frozen=True)
class RoundRobin(TimeSharing):
    """The job that has waited longest, since it arrived or since its last turn, has the next turn.

    This is the time-sharing of Gandiva (Xiao et al., OSDI 2018) as Hermes compares with it, whose quantum is the
    default. It looks at no losses.

    Args:
        quantum: seconds of a turn.
    """

    quantum: float = 30.0

    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """Seconds waited; who runs, waits least."""
        return [-inf if job.devices else now - job.since for job in jobs]

    def is_measured(self, job: JobView) -> bool:
        """Always: time is all that counts."""
        return True
