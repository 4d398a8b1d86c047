"""SLAQ, as Hermes compares with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import final

from shoal.plan.schedule.base import JobView
from shoal.plan.schedule.time_sharing import TimeSharing

__all__ = ["Slaq"]


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
