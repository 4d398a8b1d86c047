"""Policies that the papers compare with."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import ClassVar, final

from shoal.plan.schedule.base import JobView
from shoal.plan.schedule.knapsack import DeviceOrder, JobOrder, Knapsack
from shoal.plan.schedule.time_sharing import TimeSharing

__all__ = ["BestFit", "RoundRobin", "ShortestFirst", "Slaq"]


@final
class BestFit(Knapsack):
    """Best fit: place the oldest job first, each on the device with room and the least remaining compute."""

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.BEST_FIT


@final
class ShortestFirst(Knapsack):
    """Place the shortest job first, each alone on the first idle device with room.

    On one device without arrivals this gives the least mean completion time (W. E. Smith, 1956).
    """

    jobs = JobOrder.SHORTEST
    devices = DeviceOrder.FIRST_FIT
    exclusive = True


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


@final
@dataclass(frozen=True)
class Slaq(TimeSharing):
    """The job with the highest newest loss runs.

    This is SLAQ (Zhang et al., SoCC 2017) as Hermes compares with it (section 4.2), whose quantum is the default: the
    quality still to be gained on one device counts, not the gain in the next quantum that SLAQ itself predicts.

    Args:
        quantum: Seconds of a turn.
    """

    quantum: float = 30.0

    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """Return the newest loss; NaN if it is not finite."""
        newest = [job.quanta[-1].last for job in jobs]
        return [loss if isfinite(loss) else nan for loss in newest]
