"""The base class of algorithms that stand between a study and another algorithm."""

from collections.abc import Sequence
from typing import Any

from shoal.algorithms.base import Algorithm

__all__ = ["WrapperAlgorithm"]


class WrapperAlgorithm(Algorithm):
    """Has the search problem and the settings of an inner algorithm; a subclass changes what passes between it and the
    study.

    `tune` builds wrappers from its arguments, in one order: the study, then the repeats, the stop rules, and innermost
    the search algorithm.

    Args:
        inner: Algorithm that serves no study yet; it serves that of the wrapper.
    """

    def __init__(self, inner: Algorithm) -> None:
        self.inner = inner
        self.copies_trials = inner.copies_trials
        self.models_best_epochs = inner.models_best_epochs
        self.takes_several_metrics = inner.takes_several_metrics

    def check_new(self) -> None:
        """Raise an AlgorithmError if the inner algorithm is bound already."""
        self.inner.check_new()

    def bind(self, *args: Any, **settings: Any) -> None:
        """Set the search problem, which is that of the inner algorithm."""
        self.check_new()
        self.inner.bind(*args, **settings)
        self.begin(self.inner.problem)
        self._problem = self.inner.problem

    @property
    def longest_budget(self) -> int | None:
        """Epochs of the longest trials of the inner algorithm."""
        return self.inner.longest_budget

    @property
    def modelled_budgets(self) -> Sequence[int]:
        """Epochs at which values of earlier trials enter the model of the inner algorithm."""
        return self.inner.modelled_budgets

    def may_return(self, number: int) -> bool:
        """Whether the inner algorithm may name the trial."""
        return self.inner.may_return(number)

    def extend(self, trials: int) -> None:
        """Extend the inner algorithm, whose trials count."""
        self.inner.extend(trials)

    @property
    def finished(self) -> bool:
        """Whether the inner algorithm has finished."""
        return self.inner.finished
