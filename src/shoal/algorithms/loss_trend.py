"""The rule that ends trials whose learning curves cannot reach the best value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from shoal.algorithms.base import Problem, check_integer, check_number
from shoal.algorithms.rules import Moment, StopRule
from shoal.core.errors import AlgorithmError
from shoal.core.plain import plain_fields

__all__ = ["LossTrend"]

_LEAST_WINDOW = 3
"""Epochs that a line and the noise about it are estimated from, at least."""
_MOST_MARGIN = 100.0

_AXES: tuple[Callable[[float], float], ...] = (math.log, float)
"""Against which a curve is drawn: a straight line against the first flattens out, one against the second does not."""

_Points = tuple[tuple[int, float], ...]
"""Epochs with their losses."""


@dataclass(frozen=True)
class LossTrend(StopRule):
    """Stops a trial whose learning curve cannot reach the best value of another trial within its budget.

    The curves of fine-tuning flatten out: a power law of the epochs, a · epoch^-b + c, lies above each of its tangents
    if it is drawn against the logarithm of the epochs. So the line through the last epochs, continued to the end of the
    longest trials, says what the trial can reach at best. Where the curve is straighter against the epochs themselves,
    as at a slow start, the line is drawn against these. A trial is stopped if its own best value, and that of the line
    moved in its favour by `margin` standard errors, are worse than what the best trial has reached already. A trial
    whose values get worse is stopped as soon as another was better, a trial with NaN after the warm-up; the best one
    only then.

    It is an extrapolation: it fails where a loss falls faster later, as after a step of the learning rate.
    Epochs that are parts of a pass over the data (`Task.steps_per_epoch`) let trials end after a fraction of it.

    Args:
        warmup: Epochs that do not count, in which the learning rate rises.
        window: Number of last epochs through which the line is drawn; until there are 3, no trial is stopped.
        margin: Standard errors of the extrapolated value, by the noise about the line, that a trial has in its favour.

    Raises:
        AlgorithmError: a setting is no number, or out of range.
    """

    warmup: int = 2
    window: int = 4
    margin: float = 1.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("warmup", self.warmup, least=0)
        check_integer("window", self.window, least=_LEAST_WINDOW)
        check_number("margin", self.margin, 0, _MOST_MARGIN)

    def check(self, problem: Problem, longest: int | None) -> None:
        """Refuse several metrics, of which one says nothing about the front, and trials of unknown length."""
        if problem.other_objectives:
            names = ", ".join(goal.metric for goal in problem.objectives)
            raise AlgorithmError(
                f"LossTrend compares trials by one metric, and this study has {names}; leave out `stop=[LossTrend()]`, "
                "or give one metric"
            )
        if longest is None:
            raise AlgorithmError(
                "LossTrend extrapolates to the end of the longest trials, and the algorithm does not say how many "
                "epochs they have; let its `longest_budget` return them"
            )

    def decide(self, memory: _Points | None, moment: Moment) -> tuple[_Points, str]:
        """Stop if the best trial has reached more than this one can."""
        if moment.epoch <= self.warmup:
            return (), ""
        points = (*(memory or ()), (moment.epoch, moment.loss))[-self.window :]
        if moment.loss == math.inf:
            return points, f"{moment.objective.metric} is {moment.value} at epoch {moment.epoch}"
        leader, end = moment.leader, moment.last_epoch
        if leader is None or end is None or moment.epoch >= end or len(points) < _LEAST_WINDOW:
            return points, ""
        bound = _bound(points, end, self.margin)
        if min(moment.best, bound) <= leader.loss:
            return points, ""
        return points, f"{_evidence(moment, bound, end)}; trial {leader.trial} has {_shown(moment, leader.loss)}"


def _evidence(moment: Moment, bound: float, end: int) -> str:
    falls = "falls" if moment.objective.mode == "min" else "rises"
    now = f"{moment.objective.metric} {_shown(moment, moment.loss)} at epoch {moment.epoch}"
    best = f", its best is {_shown(moment, moment.best)}" if moment.best < min(moment.loss, bound) else ""
    if bound >= moment.loss:
        return f"{now} {falls} no more{best}"
    step = (moment.loss - bound) / (end - moment.epoch)
    return f"{now} {falls} by at most {step:.2g} an epoch, and reaches at best {_shown(moment, bound)} at {end}{best}"


def _shown(moment: Moment, loss: float) -> str:
    return f"{moment.objective.loss(loss):.4g}"


def _bound(points: Sequence[tuple[int, float]], end: int, margin: float) -> float:
    """The loss at the epoch `end` on the straightest line through the points, less its standard errors; infinite if a
    loss is.
    """
    scale = max(abs(loss) for _, loss in points) or 1.0  # squares of losses could overflow
    if math.isinf(scale):
        return math.inf
    losses = [loss / scale for _, loss in points]
    lines = [_line([axis(epoch) for epoch, _ in points], losses, axis(end)) for axis in _AXES]
    _, reached, error = min(lines)
    return (reached - margin * error) * scale


def _line(places: Sequence[float], losses: Sequence[float], end: float) -> tuple[float, float, float]:
    """The least-squares line through some losses: its squared distances from them, its loss at the place `end`, and the
    standard error of that.
    """
    count, middle, level = len(places), fmean(places), fmean(losses)
    square = math.fsum((x - middle) ** 2 for x in places)
    slope = math.fsum((x - middle) * (y - level) for x, y in zip(places, losses, strict=True)) / square
    rest = math.fsum((y - level - slope * (x - middle)) ** 2 for x, y in zip(places, losses, strict=True))
    error = math.sqrt(rest / (count - 2) * (1 / count + (end - middle) ** 2 / square))
    return rest, level + slope * (end - middle), error
