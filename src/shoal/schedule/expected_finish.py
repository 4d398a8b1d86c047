"""The trial that is expected to get there soonest first."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import expm1, inf, isfinite, log
from statistics import median
from typing import final

from shoal.core.errors import PolicyError
from shoal.core.event import TurnStats
from shoal.schedule.base import JobView
from shoal.schedule.time_sharing import TimeSharing

__all__ = ["ExpectedFinish", "Trend", "trend"]

_INSTANT = 1e-9
"""Least seconds that a job counts as having run, where the logarithm of its time is asked for."""

_FAR = 50.0
"""Exponent from which on a time is too far away to tell from others."""


@dataclass(frozen=True)
class Trend:
    """Where a job's loss stands and how it falls.

    Args:
        start: loss at the beginning.
        level: loss now.
        slope: how much it falls while the time that the job has run grows e-fold; not below 0.
        ran: seconds that it has trained for.
        left: seconds of training before it.
    """

    start: float
    level: float
    slope: float
    ran: float
    left: float


@final
@dataclass(frozen=True)
class ExpectedFinish(TimeSharing):
    """The job that is expected to reach the goal soonest runs, and no job is written off before it had its time.

    A loss that falls as a power of time falls nearly evenly in the logarithm of time (compare Domhan et al., IJCAI
    2015), so each trend is extended as loss(t) = level - (slope + doubt) ln(t / ran). All losses count as reductions
    from the median start of all jobs, in units of the greatest one so far.

    - Level against the others: the goal is a part of the greatest reduction that any job has reached, or that the most
      promising one will have reached at its end, by its slope alone. What other jobs of its study start from, reach and
      end at is all that is known of good and bad.
    - Trend: time to the goal is ran · (exp((goal - reduction) / (slope + doubt)) - 1).
    - Uncertainty: `doubt` is a slope that any job may yet show. A flat job is expected to need a multiple of the time
      that it has had already, so those that have had least are tried first, each for longer than the last time: among
      hopeless ones a late starter is found, at no more than a fixed part of the time.
    - A job that is at the goal has only its end to reach: the time it has left counts. It yields to those that are
      nearly there.
    - Cost of switching: for the running job, `switch_seconds` less.
    - Noise: a quantum counts by the middle of its highest and lowest loss, as in Hermes, and the slope is taken from
      the half of its time that lies behind the job to now.

    This is shortest remaining processing time first, which is what makes the mean time to the goal least on one device
    when the times are known (Schrage 1968). A loss that is not finite counts as never getting there.

    Args:
        quantum: seconds of a turn.
        goal: part of the expected best reduction at which a trial has got there; Hermes measures time to 0.9.
        doubt: slope that any job may yet show, in units of the greatest reduction so far. All of 0.05 to 0.2 do well
            on real curves.

    Raises:
        PolicyError: a setting is out of range.
    """

    goal: float = 0.9
    doubt: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.goal <= 1:
            raise PolicyError(f"`goal` must be above 0 and at most 1, got {self.goal!r}")
        if not (self.doubt > 0 and isfinite(self.doubt)):
            raise PolicyError(f"`doubt` must be above 0 and finite, got {self.doubt!r}")

    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """Seconds until the job gets there, the fewer the better."""
        seconds: dict[str, float] = {}
        studies: dict[str | None, list[JobView]] = defaultdict(list)
        for job in jobs:
            studies[job.study].append(job)
        for rivals in studies.values():
            trends = [
                trend(job.quanta, min((ask.seconds for ask in job.demand.values()), default=0.0)) for job in rivals
            ]
            best = min((job.best for job in rivals if job.best is not None), default=inf)
            seconds.update(zip([job.id for job in rivals], self.seconds(trends, best), strict=True))
        return [(job.switch_seconds if job.devices else 0.0) - seconds[job.id] for job in jobs]

    def seconds(self, trends: Sequence[Trend | None], best: float = inf) -> list[float]:
        """Expected seconds of each job of a study until it gets there; inf for a job without a trend.

        Args:
            trends: of its jobs.
            best: the lowest loss that was ever measured in it.
        """
        known = [each for each in trends if each is not None]
        if not known:
            return [inf] * len(trends)
        start = median([each.start for each in known])
        best = min(best, *(each.level for each in known))
        unit = start - best
        if unit <= 0:
            return [inf if each is None else each.ran for each in trends]
        expected = [start - each.level + each.slope * log(1 + each.left / each.ran) for each in known]
        goal = self.goal * max(unit, *expected)
        doubt = self.doubt * unit
        found = []
        for each in trends:
            if each is None:
                found.append(inf)
            elif start - each.level >= goal:
                found.append(each.left)
            else:
                away = (goal - start + each.level) / (each.slope + doubt)
                found.append(each.ran * expm1(min(away, _FAR)))
        return found


def trend(quanta: Sequence[TurnStats], left: float) -> Trend | None:
    """What a job's turns say of its loss; None if one that counts was not finite.

    Args:
        quanta: at least one.
        left: seconds of training before the job.
    """
    times = list(accumulate(quantum.seconds for quantum in quanta))
    ran = max(times[-1], _INSTANT)
    start = quanta[0].highest
    level = _middle(quanta[-1])
    behind = bisect_right(times, ran / 2) - 1
    if behind >= 0:
        then, before = times[behind], _middle(quanta[behind])
    else:
        then, before = times[0] / quanta[0].steps, start
    if not (isfinite(start) and isfinite(level) and isfinite(before)):
        return None
    slope = max(0.0, before - level) / log(ran / then) if 0 < then < ran else 0.0
    return Trend(start, level, slope, ran, left)


def _middle(quantum: TurnStats) -> float:
    return (quantum.highest + quantum.lowest) / 2
