"""Ranking of the trials of a study, and the front of several metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.hypervolume import REFERENCE_KEY, Hypervolume, hypervolume, reference_point
from shoal.core.objective import Objective, pareto_front
from shoal.core.repeats import p_value
from shoal.core.rows import TrialRow, values
from shoal.core.score import Score, order

__all__ = [
    "all_nan",
    "front",
    "front_volume",
    "least_violating",
    "next_best",
    "ranked",
    "why_no_best",
]


def front(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> set[int]:
    """Numbers of the feasible trials that no other dominates; of one metric the best and its equals."""
    scores = _scores(rows, objectives)
    return pareto_front({number: score.losses for number, score in scores.items() if not score.violation})


def ranked(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> list[TrialRow]:
    """The best trials first, in the order of algorithms; then those without, and the failed ones.

    With several metrics, the front comes first.
    """
    place = {number: index for index, number in enumerate(order(_scores(rows, objectives)))}
    return sorted(rows, key=lambda row: (place.get(row.number, len(place)), row.number))


def _scores(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> dict[int, Score]:
    scores = {}
    for row in rows:
        if (shown := values(row, objectives)) is not None:
            losses = tuple(goal.loss(value) for goal, value in zip(objectives, shown, strict=True))
            scores[row.number] = Score(False, row.violation, losses)
    return scores


def least_violating(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> TrialRow | None:
    """The trial that violates the constraints least, if no trial with values is feasible; else None."""
    valued = [row for row in rows if values(row, objectives) is not None]
    least = min(valued, key=lambda row: (row.violation, row.number), default=None)
    return least if least is not None and least.violation else None


def front_volume(
    rows: Sequence[TrialRow],
    objectives: Sequence[Objective],
    study: Mapping[str, Any],
    reference: Sequence[float] | None = None,
) -> Hypervolume | None:
    """The hypervolume of the feasible trials of a study; None while a metric has no finite value.

    Args:
        study: `JournalView.study`, which has the study's own reference once it is fixed.
        reference: Reference instead of the study's own.

    Raises:
        AlgorithmError: there are not two or three metrics, or the reference is not a finite value of each.
    """
    shown = {row.number: values(row, objectives) for row in rows}
    point = reference if reference is not None else study.get(REFERENCE_KEY)
    if point is None and (point := reference_point(filter(None, shown.values()), objectives)) is None:
        return None
    return hypervolume(filter(None, (shown[row.number] for row in rows if not row.violation)), objectives, point)


def next_best(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> tuple[TrialRow, float] | None:
    """The second best configuration by the first metric, and the p-value of its difference to the best; None unless
    both are feasible and have finite values of two repeats.
    """
    feasible = [row for row in rows if not row.violation]
    pair = ranked(feasible, objectives[:1])[:2]
    name = objectives[0].metric
    if len(pair) < 2 or not all(name in row.deviations and values(row, objectives[:1]) for row in pair):
        return None
    best, other = ([repeat.ranked[name] for repeat in row.members] for row in pair)
    return pair[1], p_value(best, other)


def all_nan(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> str | None:
    """Return the first of the study's metrics all of whose reports were NaN; None if there is none."""
    for name in (goal.metric for goal in objectives):
        reported = [row for row in rows if name in row.metrics]
        if reported and not any(name in row.best for row in reported):
            return name
    return None


def why_no_best(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> str:
    """Why no trial is the best, as the end of a sentence that begins with the study; no feasible row has values."""
    if (least := least_violating(rows, objectives)) is not None:
        return f"is feasible; trial {least.number} violates the constraints least, by {least.violation:.3g}"
    if (name := all_nan(rows, objectives)) is not None:
        return f"has a value of {name!r}: all that were reported are NaN"
    names = [goal.metric for goal in objectives]
    return f"has a value of {names[0]!r} yet" if len(names) == 1 else f"has values of {names} yet"
