"""Scores of trials, and their order: by violation of constraints, by one loss or by the front of several."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import inf, isnan
from typing import NamedTuple

from shoal.core.constraint import Constraint, violation
from shoal.core.fronts import epsilon_net, fronts
from shoal.core.objective import Objective

__all__ = ["Score", "order", "score_of", "worst_score"]


class Score(NamedTuple):
    """The result of a trial that algorithms and tables compare; of two with one loss each, the lesser is better.

    Args:
        is_nan: Whether one of the objectives is NaN, or the trial has failed: such trials are the last.
        violation: Violation of the constraints, 0 if the trial is feasible.
        losses: Losses by each objective, less is better; all infinite if `is_nan`.
    """

    is_nan: bool
    violation: float
    losses: tuple[float, ...]

    @property
    def note(self) -> str:
        """The end of a reason for which a trial is stopped: its violation, if it has one."""
        return f"; violates the constraints by {self.violation:.3g}" if self.violation else ""


def score_of(
    values: Sequence[float],
    metrics: Mapping[str, float],
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint] = (),
) -> Score:
    """The score of a report.

    Args:
        values: Values of the objectives.
        metrics: All reported values, of which the constraints read theirs.
    """
    if any(map(isnan, values)):
        return worst_score(len(objectives))
    losses = tuple([goal.loss(value) for goal, value in zip(objectives, values, strict=True)])
    return Score(False, violation(constraints, metrics) if constraints else 0.0, losses)


def worst_score(objectives: int) -> Score:
    """The score of a trial that failed or measured NaN."""
    return Score(True, inf, (inf,) * objectives)


def order(scores: Mapping[int, Score]) -> list[int]:
    """Numbers of trials, the best first.

    With one loss: by violation, loss and number. With several: by violation, by the front on which a trial is among
    those of equal violation (the first front is what no other trial dominates, the second what none dominates without
    the first, ...), and within a front by an epsilon-net: first the trial with the least first loss, then always the
    one farthest from all before, each loss scaled to its range in the front (Schmucker et al. 2021, MO-ASHA). Equal
    trials are ordered by number. NaN comes last. The order within a front depends on the scale of the losses, the
    fronts do not.
    """
    ranking = sorted(scores, key=lambda number: (scores[number], number))
    if not ranking or len(scores[ranking[0]].losses) == 1:
        return ranking
    found: list[int] = []
    for _, group in groupby(ranking, key=lambda number: scores[number][:2]):
        losses = {number: scores[number].losses for number in group}
        for front in fronts(losses):
            found += epsilon_net(front, losses)
    return found
