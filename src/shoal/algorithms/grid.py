"""Grid search."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.base import Problem, call_text
from shoal.algorithms.bracket import Bracket, BracketedAlgorithm, check_whole_training, whole_training
from shoal.core.errors import AlgorithmError, SpaceError
from shoal.core.plain import plain_fields
from shoal.core.space import config_text

__all__ = ["Grid"]

_log = logging.getLogger("shoal.algorithms")


@dataclass(eq=False)
class Grid(BracketedAlgorithm):
    """Trains every point of the discrete choices of a space to the end; the space's last parameter changes fastest.

    Points that the conditions of the space refuse are left out, and their number is logged.

    Args:
        epochs: Epochs of each trial.
        group_by: Parameters by which the points are ordered, so that those which can be fused into
            one array follow each other.
        compare_after: Epochs that all trials train before one of them continues, so that all are soon compared; a trial
            whose metric is NaN then ends. None: each trial trains to the end in one go.

    Raises:
        AlgorithmError: a setting is not an integer of at least 1, or `compare_after` is not below `epochs`.
    """

    epochs: int
    group_by: Sequence[str] = ()
    compare_after: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_whole_training(self.compare_after, self.epochs)

    def extend(self, trials: int) -> None:
        """Refuse: there are no more points."""
        raise AlgorithmError(f"{call_text(self)} tries every point of its space; begin a new study with a larger space")

    def brackets_for(self, problem: Problem) -> list[Bracket]:
        """One bracket, which promotes all trials.

        Raises:
            SpaceError: the space has infinitely many points, or its conditions refuse them all.
        """
        points = problem.space.grid()
        refused = problem.space.count() - len(points)
        if not points:
            raise SpaceError(f"the conditions of the space refuse all of its {refused} points")
        if refused:
            _log.warning("the conditions of the space refuse %d of its %d points", refused, refused + len(points))
        first = [problem.sample(number) for number in range(len(problem.initial))]
        tried = set(map(config_text, first))
        others = problem.sorted_by_group([config for config in points if config_text(config) not in tried])
        trials = [problem.trial(number, config) for number, config in enumerate([*first, *others])]
        return [Bracket("grid", whole_training(len(trials), self.compare_after, self.epochs), trials, problem)]
