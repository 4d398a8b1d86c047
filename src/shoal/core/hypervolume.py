"""The hypervolume that a front dominates, and its reference point."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import itemgetter

from shoal.core.errors import AlgorithmError
from shoal.core.fronts import Staircase
from shoal.core.objective import Objective
from shoal.core.plain import plain

__all__ = ["MAX_METRICS", "REFERENCE_KEY", "Hypervolume", "dominated_volume", "hypervolume", "reference_point"]

MAX_METRICS = 3
"""Most metrics of which the hypervolume is measured: a sweep finds that of three, and of more the time grows fast."""

REFERENCE_KEY = "hypervolume_reference"
"""Key of a study's value: its reference, once enough trials have values; see `StudyState.fix_reference`."""

_EPSILON = 1e-12


@dataclass(frozen=True)
class Hypervolume:
    """The volume between a front and a reference point.

    Args:
        value: The volume; 0 if no trial is better than the reference in all metrics.
        reference: Reference point, a value of each metric.
    """

    value: float
    reference: tuple[float, ...]


def reference_point(values: Iterable[Sequence[float]], objectives: Sequence[Objective]) -> tuple[float, ...] | None:
    """The reference that Optuna's TPE takes: of the worst finite loss w by each metric, the greater of 1.1 w and 0.9 w.

    Args:
        values: Values of the metrics of each trial.

    Returns:
        A value of each metric; None if one has no finite value.
    """
    rows = list(values)
    point = []
    for column, goal in enumerate(objectives):
        losses = [loss for row in rows if isfinite(loss := goal.loss(row[column]))]
        if not losses:
            return None
        point.append(goal.loss(max(1.1 * max(losses), 0.9 * max(losses)) or _EPSILON))
    return tuple(point)


def hypervolume(
    values: Iterable[Sequence[float]], objectives: Sequence[Objective], reference: Sequence[float]
) -> Hypervolume:
    """The volume that trials dominate within a reference point.

    Args:
        values: Values of the metrics of each trial.
        reference: A value of each metric, in their order.

    Raises:
        AlgorithmError: there are not two or three metrics, or the reference is not a finite value of each.
    """
    names = [goal.metric for goal in objectives]
    if not 2 <= len(names) <= MAX_METRICS:
        raise AlgorithmError(f"the hypervolume is measured of 2 to {MAX_METRICS} metrics; this study has {len(names)}")
    point = tuple(map(plain, reference)) if isinstance(reference, Iterable) else ()
    if len(point) != len(names) or not all(isinstance(each, int | float) and isfinite(each) for each in point):
        raise AlgorithmError(f"`reference` must be a finite value of each of the metrics {names}, got {reference!r}")
    losses = [tuple(goal.loss(x) for goal, x in zip(objectives, each, strict=True)) for each in values]
    bound = tuple(goal.loss(x) for goal, x in zip(objectives, point, strict=True))
    return Hypervolume(dominated_volume(losses, bound), point)


def dominated_volume(losses: Iterable[Sequence[float]], reference: Sequence[float]) -> float:
    """The volume of all points that one of the given points dominates and that dominate the reference.

    Exact: a sweep along the third loss, with the area that the points so far cover of the others. Two losses are
    three, of which the third is 0 and its reference 1.
    """
    bounds = (*reference, 1.0)[:3]
    points = ((*point, 0.0)[:3] for point in losses)
    inside = [point for point in points if all(x < bound for x, bound in zip(point, bounds, strict=True))]
    staircase, volume, area, below = Staircase(), 0.0, 0.0, inf
    for first, second, third in sorted(inside, key=itemgetter(2)):
        if third > below:
            volume += area * (third - below)
        below = third
        if not staircase.covers(first, second):
            area += staircase.add(first, second, bounds[:2])
    return volume + area * (bounds[2] - below) if area else 0.0
