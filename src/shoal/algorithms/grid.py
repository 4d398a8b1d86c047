"""Grid search."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, check_integer
from shoal.algorithms.bracket import Bracket, BracketedAlgorithm, Rung

__all__ = ["Grid"]


@dataclass(eq=False)
class Grid(BracketedAlgorithm):
    """Trains every point of the discrete choices of a space to the end; the space's last parameter changes fastest.

    Args:
        epochs: Epochs of each trial.
        group_by: Parameters by which the points are ordered, so that those which can be fused into
            one array follow each other.

    Raises:
        AlgorithmError: `epochs` is not an integer of at least 1.
    """

    epochs: int
    group_by: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_integer("epochs", self.epochs)

    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """One bracket with a single rung."""
        first = [problem.sample(number) for number in range(len(problem.initial))]
        others = [config for config in problem.space.grid() if config not in first]
        configs = [*first, *problem.sorted_by_group(others)]
        trials = [problem.trial(number, config) for number, config in enumerate(configs)]
        return [Bracket("grid", [Rung(len(trials), self.epochs)], trials, problem)]
