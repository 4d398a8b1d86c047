"""Random search that stops what is worse than the middle."""

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, Totals, check_whole
from shoal.algorithms.concurrent import ConcurrentAlgorithm
from shoal.core.errors import AlgorithmError
from shoal.core.trial import Decision, TrialState

__all__ = ["Median"]


@dataclass(eq=False)
class Median(ConcurrentAlgorithm):
    """Stops a trial whose best value so far is worse than the median of what the others had on average by then.

    The median stopping rule of Golovin et al. 2017, section 3.2.2, asked every `interval` epochs: a trial is stopped if
    its best value up to there is worse than the median, over all other trials that got so far, of the mean of their
    values up to there. NaN ends a trial at once, and counts as the worst for the others.

    Args:
        n: number of trials, of random configurations.
        epochs: that each is trained unless it is stopped.
        interval: epochs from one decision to the next.
        grace: epochs for which no trial is stopped.
        least: other trials that must have got as far before one is stopped.
        concurrency: most trials that are trained at a time, whatever devices there are.
        gather: parameters by which each `concurrency` configurations are put in order, so that those which can be one
            array come together; which configurations there are does not change.

    Raises:
        AlgorithmError: a setting is no integer, or out of range.
    """

    n: int
    epochs: int
    interval: int = 1
    grace: int = 1
    least: int = 5
    concurrency: int = 32
    gather: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("n", "epochs", "interval", "grace", "least", "concurrency"):
            check_whole(name, getattr(self, name))
        if self.grace > self.epochs:
            raise AlgorithmError(f"`grace` must be at most `epochs`, {self.epochs}, got {self.grace}")

    def begin(self, problem: Problem) -> None:
        """Nothing has been measured yet."""
        super().begin(problem)
        self._values: dict[int, list[float]] = defaultdict(list)  # the less the better; NaN is inf
        self._means: dict[int, list[float]] = defaultdict(list)  # epoch -> of all trials that got there, rising
        self._going: deque[tuple[int, int]] = deque()

    @property
    def totals(self) -> Totals | None:
        """`n` trials, each trained at least up to the first decision after the grace, and at most to the end."""
        first = min(-(-self.grace // self.interval) * self.interval, self.epochs)
        return Totals(self.n, self.n * first, self.n * self.epochs)

    def next_stretch(self) -> tuple[int, int] | None:
        """Who goes on, in the order in which that was decided; else a new trial."""
        if self._going:
            return self._going.popleft()
        return (self.begin_trial(), min(self.interval, self.epochs)) if len(self.trials) < self.n else None

    def reached(self, number: int, epoch: int, value: float) -> list[Decision]:
        """Compare the trial with the others."""
        loss = self.problem.loss
        values = self._values[number]
        values.append(loss(value))
        others = self._means[epoch]
        middle = _middle(others) if len(others) >= self.least else math.inf
        count = len(others)
        insort(others, _mean(values))
        if epoch == self.epochs:
            return [Decision(number, TrialState.COMPLETE)]
        if math.isnan(value):
            return [Decision(number, TrialState.STOPPED, f"{self.problem.metric} is nan at epoch {epoch}")]
        if epoch >= self.grace and min(values) > middle:
            reason = (
                f"the best {self.problem.metric} up to epoch {epoch}, {loss(min(values)):.4g}, is worse than the "
                f"median of the means of {count} others, {loss(middle):.4g}"
            )
            return [Decision(number, TrialState.STOPPED, reason)]
        self._going.append((number, min(epoch + self.interval, self.epochs)))
        return []

    @property
    def has_paused(self) -> bool:
        """Whether anybody goes on."""
        return bool(self._going)


def _mean(values: Sequence[float]) -> float:
    """Of any values but NaN; with an infinite one it is that, and the worse one of both.

    Never beyond the values by rounding, so that of equal trials none is worse than the mean of another.
    """
    if not all(map(math.isfinite, values)):
        return math.inf if math.inf in values else -math.inf
    scale = float(1 << len(values).bit_length())  # a power of two, which rounds nothing: the sum must not overflow
    mean = math.fsum(value / scale for value in values) / len(values) * scale
    return min(max(mean, min(values)), max(values))


def _middle(rising: Sequence[float]) -> float:
    """The median; inf, by which nobody is stopped, where it lies between both infinities."""
    middle = rising[(len(rising) - 1) // 2] / 2 + rising[len(rising) // 2] / 2
    return math.inf if math.isnan(middle) else middle
