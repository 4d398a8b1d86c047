"""Grid search."""

from dataclasses import dataclass

from shoal.algorithms.base import Problem, check_whole
from shoal.algorithms.bracket import Bracket, Rung
from shoal.algorithms.bracketed import BracketedAlgorithm

__all__ = ["Grid"]


@dataclass(eq=False)
class Grid(BracketedAlgorithm):
    """Trains every point of the discrete choices of a space to the end; the space's last parameter changes fastest.

    Args:
        epochs: that each trial is trained.

    Raises:
        AlgorithmError: `epochs` is no integer of at least 1.
    """

    epochs: int

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs)

    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """One, with a single rung."""
        trials = [problem.trial(number, config) for number, config in enumerate(problem.space.grid())]
        return [Bracket("grid", [Rung(len(trials), self.epochs)], trials, problem)]
