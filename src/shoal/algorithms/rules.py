"""Rules that end trials, or a whole study, by the values that trials report."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.algorithms.base import Problem, check_integer, check_number
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective
from shoal.core.plain import plain_fields
from shoal.core.trial import TrialState

__all__ = ["Leader", "Moment", "NoImprovement", "Patience", "Percentile", "Plateau", "StopRule", "Threshold"]

_MOST = 1e300
"""Greatest delta and bound: JSON has no infinity."""


@dataclass(frozen=True)
class Leader:
    """Number and least loss of the best trial so far."""

    trial: int
    loss: float


@dataclass(frozen=True)
class Moment:
    """What a rule sees of a trial at the end of an epoch.

    Args:
        objective: First metric of the study.
        epoch: Epochs that the trial has finished.
        value: Its value, which may be NaN.
        best_before: Least loss of its earlier epochs; infinite if there are none.
        others: Losses of all other trials that have reported this epoch, ascending; infinite for NaN.
        leader: The trial with the best value so far that keeps the constraints, without this report; None if there is
            none.
        last_epoch: Epochs of the longest trials; None if the algorithm does not say.
    """

    objective: Objective
    epoch: int
    value: float
    best_before: float
    others: Sequence[float]
    leader: Leader | None = None
    last_epoch: int | None = None

    @property
    def loss(self) -> float:
        """The value as a loss: less is better, and NaN is infinite."""
        return math.inf if math.isnan(self.value) else self.objective.loss(self.value)

    @property
    def best(self) -> float:
        """Least loss of the trial so far."""
        return min(self.best_before, self.loss)


@dataclass(frozen=True)
class Plateau:
    """A sequence of losses since its last improvement by more than a delta.

    Args:
        best: Loss at the last improvement.
        at: Place of the last improvement in the sequence, or of its beginning.
    """

    best: float = math.inf
    at: int = 0

    def followed_by(self, loss: float, at: int, min_delta: float) -> "Plateau":
        """The plateau after a further loss."""
        return Plateau(loss, at) if loss < self.best - min_delta else self


class StopRule(ABC):
    """Decides whether a trial stops at the end of an epoch; a frozen dataclass, whose fields are its settings."""

    ends: ClassVar[TrialState] = TrialState.STOPPED
    """State of a trial that the rule has ended: COMPLETE if its value counts as that of a whole training."""

    def check(self, problem: Problem, longest: int | None) -> None:  # noqa: B027  (to override it is optional)
        """Check that the rule can serve a search; by default it can.

        Args:
            problem: Search problem.
            longest: Epochs of the longest trials; None if the algorithm does not say.

        Raises:
            AlgorithmError: the rule cannot.
        """

    @abstractmethod
    def decide(self, memory: Any, moment: Moment) -> tuple[Any, str]:
        """The memory of the rule after this epoch, and why the trial stops, or "".

        Args:
            memory: What the rule returned for the trial's last epoch; None at its first.
        """


@dataclass(frozen=True)
class Patience(StopRule):
    """Ends a trial whose metric has not improved for some epochs; the trial is COMPLETE.

    In an algorithm with rungs the trial keeps its place: if it is promoted, it holds its value, and trains no more.

    Args:
        epochs: Epochs without an improvement after which the trial ends.
        min_delta: A value is an improvement if it is better than that of the last improvement by more than this. A
            flat curve does not improve, and neither does NaN.

    Raises:
        AlgorithmError: a setting is no number, or out of range.
    """

    ends: ClassVar[TrialState] = TrialState.COMPLETE

    epochs: int = 10
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("epochs", self.epochs)
        check_number("min_delta", self.min_delta, 0, _MOST)

    def decide(self, memory: Plateau | None, moment: Moment) -> tuple[Plateau, str]:
        """Stop `epochs` after the last improvement."""
        plateau = (memory or Plateau()).followed_by(moment.loss, moment.epoch, self.min_delta)
        if moment.epoch - plateau.at < self.epochs:
            return plateau, ""
        return plateau, f"{moment.objective.metric} has not improved since epoch {plateau.at}"


@dataclass(frozen=True)
class Threshold(StopRule):
    """Stops a trial whose metric is out of bounds, or NaN.

    Args:
        below: A trial with a value below this is stopped; None: no bound.
        above: A trial with a value above this is stopped; None: no bound.
        warmup: Epochs in which no trial is stopped.

    Raises:
        AlgorithmError: there is no bound, or every value is out of bounds.
    """

    below: float | None = None
    above: float | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("warmup", self.warmup, least=0)
        for name, bound in (("below", self.below), ("above", self.above)):
            if bound is not None:
                check_number(name, bound, -_MOST, _MOST)
        if self.below is None and self.above is None:
            raise AlgorithmError("Threshold needs a bound: Threshold(below=...), Threshold(above=...) or both")
        if self.below is not None and self.above is not None and self.below > self.above:
            raise AlgorithmError(f"every value is out of the bounds of {self}; exchange `below` and `above`")

    def decide(self, memory: None, moment: Moment) -> tuple[None, str]:
        """Stop at a value that is out of bounds."""
        value, fault = moment.value, ""
        if math.isnan(value):
            fault = "is nan"
        elif self.below is not None and value < self.below:
            fault = f"is {value:.4g}, below {self.below:g},"
        elif self.above is not None and value > self.above:
            fault = f"is {value:.4g}, above {self.above:g},"
        if not fault or moment.epoch <= self.warmup:
            return None, ""
        return None, f"{moment.objective.metric} {fault} at epoch {moment.epoch}"


@dataclass(frozen=True)
class Percentile(StopRule):
    """Stops a trial whose best value so far is not among the best percent of the values of others at the same epoch.

    All trials that have reported the epoch count, also those that are in training or were stopped; so whether a trial
    is stopped depends on which others were there before.

    Args:
        percentile: Percentage of the others' values that may be better; 50 is a median rule.
        startup: Number of other trials that must have reported an epoch before a trial is stopped there.
        warmup: Epochs in which no trial is stopped.

    Raises:
        AlgorithmError: a setting is no number, or out of range.
    """

    percentile: float
    startup: int = 5
    warmup: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_number("percentile", self.percentile, 0, 100)
        check_integer("startup", self.startup)
        check_integer("warmup", self.warmup, least=0)

    def decide(self, memory: None, moment: Moment) -> tuple[None, str]:
        """Stop if too many others were better at this epoch than the trial has ever been."""
        count = len(moment.others)
        if moment.epoch <= self.warmup or count < self.startup:
            return None, ""
        better = bisect_left(moment.others, moment.best)
        if better == 0 or better * 100 < self.percentile * count:
            return None, ""
        return None, (
            f"{better} of {count} others had a better {moment.objective.metric} at epoch {moment.epoch}; "
            f"the best {self.percentile:g} % continue"
        )


@dataclass(frozen=True)
class NoImprovement:
    """Ends a study when its best value has not improved for some trials, counted in the order of their numbers.

    A trial counts once it and all trials with smaller numbers have ended, with its best value; failed ones count as no
    improvement. So the end does not depend on which trials were trained first. Trials that users added do not count.

    Args:
        trials: Trials without an improvement after which the study ends.
        min_delta: A trial is an improvement if its value is better than that of the last one by more than this.

    Raises:
        AlgorithmError: a setting is no number, or out of range.
    """

    trials: int = 30
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("trials", self.trials)
        check_number("min_delta", self.min_delta, 0, _MOST)
