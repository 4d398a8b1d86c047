"""Round robin: Gandiva's time-sharing."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, final

from shoal.plan.schedule.base import JobView
from shoal.plan.schedule.time_sharing import TimeSharing

__all__ = ["RoundRobin"]


@final
@dataclass(frozen=True)
class RoundRobin(TimeSharing):
    """The job with the longest wait, since its arrival or its last turn, has the next turn.

    This is the time-sharing of Gandiva (Xiao et al., OSDI 2018) as Hermes compares with it, whose quantum is the
    default. It ignores losses.

    Args:
        quantum: Seconds of a turn.
    """

    quantum: float = 30.0

    needs_losses: ClassVar[bool] = False

    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """Return the seconds of waiting; a running job comes last."""
        return [-inf if job.devices else now - job.since for job in jobs]

    def is_measured(self, job: JobView) -> bool:
        """Return True, since the policy needs no losses."""
        return True
