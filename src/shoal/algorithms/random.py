"""Random search."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, check_integer, check_more_trials, check_trials
from shoal.algorithms.bracket import Bracket, BracketedAlgorithm, check_whole_training, whole_training
from shoal.core.plain import plain_fields

__all__ = ["Random"]


@dataclass(eq=False)
class Random(BracketedAlgorithm):
    """Trains `n` random configurations to the end (Bergstra and Bengio 2012).

    Args:
        n: Number of trials.
        epochs: Epochs of each trial.
        group_by: Parameters by which configurations are ordered, see `Problem.group_by`.
        compare_after: Epochs that all trials train before one of them continues, so that all are soon compared; a trial
            whose metric is NaN then ends. None: each trial trains to the end in one go.

    Raises:
        AlgorithmError: a setting is not an integer of at least 1, or `compare_after` is not below `epochs`.
    """

    n: int
    epochs: int
    group_by: Sequence[str] = ()
    compare_after: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("n", self.n)
        check_trials(repr(self), self.n)
        check_whole_training(self.compare_after, self.epochs)

    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """One bracket, which promotes all trials."""
        return [self._bracket(problem, range(self.n))]

    def further_brackets(self, trials: int) -> list[Bracket]:
        """One more, of the next trials: those of a search with so many from the beginning, unless it is grouped."""
        check_more_trials(self, trials, self.n)
        numbers, self.n = range(self.n, trials), trials
        return [self._bracket(self.problem, numbers)]

    def _bracket(self, problem: Problem, numbers: range) -> Bracket:
        rungs = whole_training(len(numbers), self.compare_after, self.epochs)
        return Bracket("random", rungs, problem.random_trials(numbers), problem)
