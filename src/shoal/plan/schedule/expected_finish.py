"""The expected-finish policy: time-sharing, the job that is expected to reach the goal soonest first."""

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
from shoal.plan.schedule.base import JobView
from shoal.plan.schedule.time_sharing import TimeSharing, middle_loss

__all__ = ["ExpectedFinish", "Trend", "trend"]

_MIN_SECONDS = 1e-9
"""Least run time in seconds, so that its logarithm is finite."""

_MAX_EXPONENT = 50.0
"""Largest exponent; longer times count as equal."""


@dataclass(frozen=True)
class Trend:
    """Level and slope of the loss of a job.

    Args:
        slope: Fall of the loss while the run time grows e-fold; at least 0.
        ran: Seconds trained.
        remaining: Seconds of training left.
    """

    start: float
    level: float
    slope: float
    ran: float
    remaining: float


@final
@dataclass(frozen=True)
class ExpectedFinish(TimeSharing):
    """The job that is expected to reach the goal soonest runs, and no job is given up before it had enough time.

    A loss that falls as a power of time falls nearly linearly in the logarithm of time (compare Domhan et al., IJCAI
    2015), so each trend is extended as loss(t) = level - (slope + doubt) ln(t / ran). All losses count as reductions
    from the median start of all jobs, in units of the largest reduction so far.

    - Goal: a part of the largest reduction that any job has reached, or that the best job will have reached
      at its end, by its slope alone. The goal is relative, since only the other jobs of the study show which losses
      are good.
    - Trend: the time to the goal is ran · (exp((goal - reduction) / (slope + doubt)) - 1).
    - Uncertainty: `doubt` is a slope that any job may still show. A flat job is expected to need a multiple of its run
      time so far, so jobs with the least run time are tried first, each for longer than before: late starters among
      flat jobs are found, at no more than a fixed part of the time.
    - After the goal: the remaining time of the job counts. So jobs that are close to the goal run before it.
    - Cost of switching: the running job counts with `switch_seconds` less.
    - Noise: a quantum counts by the middle of its highest and lowest loss, as in Hermes, and the slope is taken over
      the second half of the run time.

    This is shortest remaining processing time first, which minimises the mean time to the goal on one device if the
    times are known (Schrage 1968). A job whose newest turn had no finite loss is not expected to reach the goal.

    Args:
        quantum: Seconds of a turn.
        goal: Part of the expected best reduction that counts as the goal; Hermes measures the time to 0.9.
        doubt: Slope that any job may still show, in units of the largest reduction so far. All values from 0.05 to 0.2
            do well on real curves.

    Raises:
        PolicyError: A setting is out of range.
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
        """Return the negative expected seconds until each job reaches the goal."""
        seconds: dict[str, float] = {}
        studies: dict[str | None, list[JobView]] = defaultdict(list)
        for job in jobs:
            studies[job.study].append(job)
        for study_jobs in studies.values():
            trends = [
                trend(job.quanta, min((ask.seconds for ask in job.demand.values()), default=0.0)) for job in study_jobs
            ]
            best = min((job.best for job in study_jobs if job.best is not None), default=inf)
            seconds.update(zip([job.id for job in study_jobs], self.seconds(trends, best), strict=True))
        return [(job.switch_seconds if job.devices else 0.0) - seconds[job.id] for job in jobs]

    def seconds(self, trends: Sequence[Trend | None], best: float = inf) -> list[float]:
        """Return the expected seconds until each job of a study reaches the goal; inf for a job without a trend."""
        known = [each for each in trends if each is not None]
        if not known:
            return [inf] * len(trends)
        start = median([each.start for each in known])
        best = min(best, *(each.level for each in known))
        unit = start - best
        if unit <= 0:
            return [inf if each is None else each.ran for each in trends]
        expected = [start - each.level + each.slope * log(1 + each.remaining / each.ran) for each in known]
        goal = self.goal * max(unit, *expected)
        doubt = self.doubt * unit
        seconds = []
        for each in trends:
            if each is None:
                seconds.append(inf)
            elif start - each.level >= goal:
                seconds.append(each.remaining)
            else:
                log_ratio = (goal - start + each.level) / (each.slope + doubt)
                seconds.append(each.ran * expm1(min(log_ratio, _MAX_EXPONENT)))
        return seconds


def trend(quanta: Sequence[TurnStats], remaining: float) -> Trend | None:
    """Return the trend of a job from its quanta with a finite loss; None if the newest has none."""
    times = list(accumulate(quantum.seconds for quantum in quanta))
    ran = max(times[-1], _MIN_SECONDS)
    level = middle_loss(quanta[-1])
    if not isfinite(level):
        return None
    known = [(time, each) for time, each in zip(times, quanta, strict=True) if isfinite(middle_loss(each))]
    first_end, first = known[0]
    index = bisect_right([time for time, _ in known], ran / 2) - 1
    if index >= 0:
        earlier, earlier_loss = known[index][0], middle_loss(known[index][1])
    else:
        earlier, earlier_loss = first_end - first.seconds + first.seconds / first.steps, first.highest
    slope = max(0.0, earlier_loss - level) / log(ran / earlier) if 0 < earlier < ran else 0.0
    return Trend(first.highest, level, slope, ran, remaining)
