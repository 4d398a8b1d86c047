"""Objectives: the metrics that trials are compared by, and the Pareto front."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shoal.core.errors import AlgorithmError, TaskError
from shoal.core.fronts import Staircase
from shoal.core.names import nearest_name_hint
from shoal.core.space import is_number

__all__ = [
    "Objective",
    "check_reported",
    "first_objective",
    "lower_is_better",
    "merge_best",
    "metric_fault",
    "metric_names",
    "missing_metric",
    "objectives",
    "pareto_front",
]


@dataclass(frozen=True)
class Objective:
    """A metric to minimise or maximise.

    Args:
        metric: Name of a reported value.
        mode: "min" or "max".

    Raises:
        AlgorithmError: `mode` is neither.
    """

    metric: str
    mode: str

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise AlgorithmError(f'`mode` must be "min" or "max", got {self.mode!r}')

    def loss(self, value: float) -> float:
        """The value, with its sign changed for "max", so that less is better."""
        return value if self.mode == "min" else -value

    def reached(self, target: float, value: float) -> bool:
        """Whether a value is as good as the target, or better; NaN is not."""
        return self.loss(value) <= self.loss(target)


def objectives(metric: str | Sequence[str], mode: str | Sequence[str]) -> tuple[Objective, ...]:
    """The objectives of a study from the arguments of `tune`.

    Args:
        mode: "min" or "max"; for several metrics one for each.

    Raises:
        AlgorithmError: there is no metric, a name occurs twice, or the number of modes differs.
    """
    if isinstance(metric, str):
        if not isinstance(mode, str):
            raise AlgorithmError(f'`mode` must be "min" or "max" where `metric` is one name, got {mode!r}')
        return (Objective(metric, mode),)
    if not isinstance(metric, list | tuple) or not metric or not all(isinstance(name, str) for name in metric):
        raise AlgorithmError(f"`metric` must be the name of a reported value, or a list of such names, got {metric!r}")
    if len(set(metric)) < len(metric):
        raise AlgorithmError(f"`metric` must name each metric once, got {metric!r}")
    if not isinstance(mode, list | tuple) or len(mode) != len(metric):
        raise AlgorithmError(
            f'`mode` must be "min" or "max" for each of the {len(metric)} metrics, a list as long, got {mode!r}'
        )
    return tuple(map(Objective, metric, mode))


def lower_is_better(name: str, objectives: Sequence[Objective]) -> bool:
    """Whether a metric is minimised: the study's by its mode, others if their name ends with "loss" or "error"."""
    for objective in objectives:
        if objective.metric == name:
            return objective.mode == "min"
    return name.endswith(("loss", "error"))


def merge_best(
    best: Mapping[str, float], metrics: Mapping[str, float], objectives: Sequence[Objective]
) -> dict[str, float]:
    """Update the best values with a report; NaN is never the best."""
    merged = dict(best)
    for name, value in metrics.items():
        if math.isnan(value):
            continue
        better = min if lower_is_better(name, objectives) else max
        merged[name] = better(merged.get(name, value), value)
    return merged


def first_objective(metrics: Mapping[str, float], objectives: Sequence[Objective]) -> float | None:
    """The value of the first objective; None if the metrics lack one of the objectives, or one is NaN."""
    values = [metrics.get(objective.metric, math.nan) for objective in objectives]
    return None if any(map(math.isnan, values)) else next(iter(values), None)


def missing_metric(objectives: Iterable[Objective], metrics: Mapping[str, object]) -> str | None:
    """The first metric of the objectives that is not reported; None if all are."""
    return next((objective.metric for objective in objectives if objective.metric not in metrics), None)


def metric_names(metrics: Iterable[str]) -> str:
    """A text with the names of reported metrics."""
    return ", ".join(map(repr, sorted(metrics))) or "nothing"


_REMEDIES = {
    "best_by": "It decides which epoch of a trial is the best. Name one of these with its mode where it was given, "
    "best_by= of shoal.tune, monitor= of ModelCheckpoint or metric_for_best_model of TrainingArguments; or report it "
    "from the first epoch on",
}
"""Argument -> what to do if its metric is not reported, where naming another is not all."""


def check_reported(objectives: Iterable[Objective], metrics: Mapping[str, object], **others: str | None) -> None:
    """Raise an error unless a task reports all metrics of the objectives, and what other arguments of `tune` name.

    Raises:
        TaskError: one is missing; the message names it and the reported ones.
    """
    for argument, name in [("metric", missing_metric(objectives, metrics)), *others.items()]:
        if name is not None and name not in metrics:
            raise TaskError(
                f"{argument} {name!r} is not reported by the task{nearest_name_hint(name, metrics)}; it reports "
                f"{metric_names(metrics)}. " + _REMEDIES.get(argument, f"Name one of these as {argument}=")
            )


def metric_fault(name: object, value: object) -> str:
    """An error text on a reported metric; "" if it is valid. NaN and infinities are valid."""
    if not isinstance(name, str):
        return f"a metric is named {name!r}; names must be strings, such as {str(name)!r}"
    if not is_number(value):
        return f"the metric {name!r} must be a number, got {value!r}"
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return f"the metric {name!r} is an integer too large for a float; report its logarithm"
    return ""


def pareto_front(losses: Mapping[int, Iterable[float]]) -> set[int]:
    """The Pareto front: the points that no other dominates, equal points included.

    One point dominates another if it is at least as good in every objective and better in one.

    Args:
        losses: Number of a point -> its losses, less is better, none of them NaN.
    """
    # In this order no point is dominated by a later one, and each dominated point is dominated by one of the front.
    points = {number: tuple(values) for number, values in losses.items()}
    ordered = groupby(sorted(points, key=points.__getitem__), key=points.__getitem__)
    staircase, others = Staircase(), list[tuple[float, ...]]()
    found: set[int] = set()
    for values, numbers in ordered:
        if len(values) <= 3:  # the first loss never falls, so that the others decide
            second, third = (*values[1:], 0.0, 0.0)[:2]
            if staircase.covers(second, third):
                continue
            staircase.add(second, third)
        else:
            if any(_dominates(other, values) for other in others):
                continue
            others.append(values)
        found.update(numbers)
    return found


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
