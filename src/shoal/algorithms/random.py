"""Random search."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, check_integer, check_trials
from shoal.algorithms.bracket import Bracket, BracketedAlgorithm, Rung
from shoal.core.plain import plain_fields

__all__ = ["Random"]


@dataclass(eq=False)
class Random(BracketedAlgorithm):
    """Trains `n` random configurations to the end (Bergstra and Bengio 2012).

    Args:
        n: Number of trials.
        epochs: Epochs of each trial.
        group_by: Parameters by which the configurations are ordered, so that those which can be one array come
            together. The set of configurations does not change.

    Raises:
        AlgorithmError: a setting is not an integer of at least 1.
    """

    n: int
    epochs: int
    group_by: Sequence[str] = ()

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("n", self.n)
        check_trials(repr(self), self.n)
        check_integer("epochs", self.epochs)

    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """One bracket with a single rung."""
        return [Bracket("random", [Rung(self.n, self.epochs)], problem.random_trials(range(self.n)), problem)]
