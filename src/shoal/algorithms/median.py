"""Random search with the median stopping rule."""

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, Totals, check_integer
from shoal.algorithms.concurrent import ConcurrentAlgorithm
from shoal.core.errors import AlgorithmError
from shoal.core.plain import plain_fields
from shoal.core.score import Score
from shoal.core.trial import Decision, Report, TrialState

__all__ = ["Median"]


@dataclass(eq=False)
class Median(ConcurrentAlgorithm):
    """Stops a trial whose best value so far is worse than the median of the running means of the other trials.

    The median stopping rule of Golovin et al. 2017, section 3.2.2, applied every `interval` epochs: a trial is stopped
    if its best value so far is worse than the median, over all other trials that reached this epoch, of the mean of
    their values so far. NaN ends a trial at once, and counts as the worst for the others. The rule compares the metric
    alone: constraints count only for which trial is the best in the end.

    Args:
        n: Number of trials, of random configurations.
        epochs: Epochs of each trial that is not stopped.
        interval: Epochs from one decision to the next.
        grace: First epoch at which a trial may be stopped.
        least: Number of other trials that must have reached an epoch before a trial is stopped there.
        concurrency: Largest number of trials in training at a time, on any number of devices.
        group_by: Parameters by which configurations are ordered, see `Problem.group_by`.

    Raises:
        AlgorithmError: a setting is not an integer, or out of range.
    """

    n: int
    epochs: int
    interval: int = 1
    grace: int = 1
    least: int = 5
    concurrency: int = 32
    group_by: Sequence[str] = ()

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("n", "epochs", "interval", "grace", "least", "concurrency"):
            check_integer(name, getattr(self, name))
        if self.grace > self.epochs:
            raise AlgorithmError(f"`grace` must be at most `epochs`, {self.epochs}, got {self.grace}")

    def begin(self, problem: Problem) -> None:
        """Begin without measurements."""
        super().begin(problem)
        self._values: dict[int, list[float]] = defaultdict(list)  # losses; inf for NaN
        self._means: dict[int, list[float]] = defaultdict(list)  # epoch -> means of all trials there, ascending
        self._to_continue: deque[tuple[int, int]] = deque()

    @property
    def totals(self) -> Totals | None:
        """`n` trials, each trained at least up to the first decision after the grace, and at most to the end."""
        first = min(-(-self.grace // self.interval) * self.interval, self.epochs)
        return Totals(self.n, self.n * first, self.n * self.epochs)

    def next_training(self) -> tuple[int, int] | None:
        """The trial whose turn it is to be trained further; else a new trial."""
        if self._to_continue:
            return self._to_continue.popleft()
        return (self.begin_trial(), min(self.interval, self.epochs)) if len(self.trials) < self.n else None

    def reached(self, report: Report, score: Score) -> list[Decision]:
        """Compare the trial with the others."""
        number, epoch = report.trial, report.epoch
        loss = self.problem.objectives[0].loss
        values = self._values[number]
        values.append(score.losses[0])
        others = self._means[epoch]
        median = _median(others) if len(others) >= self.least else math.inf
        count = len(others)
        insort(others, _mean(values))
        if epoch == self.epochs:
            return [Decision(number, TrialState.COMPLETE)]
        if score.is_nan:
            return [Decision(number, TrialState.STOPPED, self.problem.nan_reason(epoch))]
        if epoch >= self.grace and min(values) > median:
            reason = (
                f"the best {self.problem.metric} up to epoch {epoch}, {loss(min(values)):.4g}, is worse than the "
                f"median of the means of {count} others, {loss(median):.4g}"
            )
            return [Decision(number, TrialState.STOPPED, reason)]
        self._to_continue.append((number, min(epoch + self.interval, self.epochs)))
        return []

    @property
    def has_paused(self) -> bool:
        """Whether a trial is to be trained further."""
        return bool(self._to_continue)


def _mean(values: Sequence[float]) -> float:
    """The mean of values without NaN; infinite if one is, and the worse infinity of both.

    It never leaves the range of the values by rounding, so that of equal trials none is worse than the mean of another.
    """
    if not all(map(math.isfinite, values)):
        return math.inf if math.inf in values else -math.inf
    scale = float(1 << len(values).bit_length())  # a power of two, so exact; else the sum could overflow
    mean = math.fsum(value / scale for value in values) / len(values) * scale
    return min(max(mean, min(values)), max(values))


def _median(ascending: Sequence[float]) -> float:
    """The median; inf, by which no trial is stopped, if it lies between both infinities."""
    median = ascending[(len(ascending) - 1) // 2] / 2 + ascending[len(ascending) // 2] / 2
    return math.inf if math.isnan(median) else median
