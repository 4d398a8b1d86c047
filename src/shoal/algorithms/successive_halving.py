"""Successive halving with synchronous rungs."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, check_integer, check_more_trials, check_trials
from shoal.algorithms.bracket import Bracket, BracketedAlgorithm, Rung, check_halving, milestones
from shoal.core.plain import plain_fields

__all__ = ["SuccessiveHalving"]


@dataclass(eq=False)
class SuccessiveHalving(BracketedAlgorithm):
    """Trains `n` random configurations for a while, the best of them `eta` times as long, and so on (Jamieson and
    Talwalkar 2016).

    Rung i has floor(n / eta^i) trials, at least one, and min_epochs · eta^i epochs; the last one has `max_epochs`.
    `ASHA` does the same without waiting for a rung to be complete, `Hyperband` at every trade-off between `n` and
    `min_epochs`.

    Args:
        n: Number of trials.
        max_epochs: Longest training of a trial.
        eta: Factor by which each rung has fewer trials, and more epochs.
        min_epochs: Epochs of the first rung.
        group_by: Parameters by which configurations are ordered, see `Problem.group_by`.

    Raises:
        AlgorithmError: a setting is not an integer, or out of range.
    """

    n: int
    max_epochs: int
    eta: int = 3
    min_epochs: int = 1
    group_by: Sequence[str] = ()

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("n", self.n)
        check_trials(repr(self), self.n)
        check_halving(self.min_epochs, self.max_epochs, self.eta)

    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """One bracket."""
        return [self._bracket("halving", problem, range(self.n))]

    def further_brackets(self, trials: int) -> list[Bracket]:
        """One more, of the next trials, which are compared with each other only."""
        check_more_trials(self, trials, self.n)
        numbers, self.n = range(self.n, trials), trials
        return [self._bracket(f"halving from trial {numbers.start}", self.problem, numbers)]

    def _bracket(self, name: str, problem: Problem, numbers: range) -> Bracket:
        epochs = milestones(self.min_epochs, self.max_epochs, self.eta)
        rungs = [Rung(max(1, len(numbers) // self.eta**i), each) for i, each in enumerate(epochs)]
        return Bracket(name, rungs, problem.random_trials(numbers), problem)
