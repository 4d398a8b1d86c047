"""Ranking of the trials of a study, and the front of several metrics."""

from collections.abc import Sequence, Set

from shoal.core.objective import Objective, pareto_front
from shoal.core.repeats import ConfigurationRow, p_value
from shoal.core.rows import TrialRow
from shoal.core.trial import TrialState

__all__ = ["all_nan", "front", "next_best", "ranked", "values", "why_no_best"]


def values(row: TrialRow, objectives: Sequence[Objective]) -> tuple[float, ...] | None:
    """Return the last values of a study's metrics; None for a trial that lacks one, or that failed."""
    if row.objective is None or row.state is TrialState.FAILED:
        return None
    return (row.objective, *(row.metrics[other.metric] for other in objectives[1:]))


def front(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> set[int]:
    """Numbers of the trials that no other dominates, by last values; for one metric, the best and its equals."""
    losses = {}
    for row in rows:
        if (shown := values(row, objectives)) is not None:
            losses[row.number] = [goal.loss(value) for goal, value in zip(objectives, shown, strict=True)]
    return pareto_front(losses)


def ranked(rows: Sequence[TrialRow], objectives: Sequence[Objective], best: Set[int] | None = None) -> list[TrialRow]:
    """The best trials first, by the last value of the study's metric; then those without a value and the failed ones.

    With several metrics, the front (`best`) comes first, then the others, both by the first metric.
    """
    if best is None:
        best = front(rows, objectives) if len(objectives) > 1 else set()

    def key(row: TrialRow) -> tuple[bool, bool, float, int]:
        shown = values(row, objectives)
        if shown is None:
            return True, True, 0.0, row.number
        return False, row.number not in best, objectives[0].loss(shown[0]), row.number

    return sorted(rows, key=key)


def next_best(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> tuple[ConfigurationRow, float] | None:
    """The second best configuration by the first metric, and the p-value of its difference to the best; None unless
    both have finite values of two repeats.
    """
    pair = [row for row in ranked(rows, objectives[:1])[:2] if isinstance(row, ConfigurationRow)]
    name = objectives[0].metric
    if len(pair) < 2 or not all(name in row.deviations and values(row, objectives[:1]) for row in pair):
        return None
    best, other = ([repeat.metrics[name] for repeat in row.repeats] for row in pair)
    return pair[1], p_value(best, other)


def all_nan(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> str | None:
    """Return the first of the study's metrics all of whose reports were NaN; None if there is none."""
    for name in (goal.metric for goal in objectives):
        reported = [row for row in rows if name in row.metrics]
        if reported and not any(name in row.best for row in reported):
            return name
    return None


def why_no_best(rows: Sequence[TrialRow], objectives: Sequence[Objective]) -> str:
    """Why no trial is the best, as the end of a sentence that begins with the study; no row has values."""
    if (name := all_nan(rows, objectives)) is not None:
        return f"has a value of {name!r}: all that were reported are NaN"
    names = [goal.metric for goal in objectives]
    return f"has a value of {names[0]!r} yet" if len(names) == 1 else f"has values of {names} yet"
