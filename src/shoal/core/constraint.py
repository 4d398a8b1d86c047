"""Constraints: bounds that reported values of a trial must keep."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective

__all__ = ["Constraint", "constraint_argument", "parse_constraints", "unreported", "violation", "with_directions"]

_BOUND = re.compile(r"\s*(<=|>=)\s*(\S+)\s*")
_NAMED_BOUND = re.compile(r"(.*?)\s*((?:<=|>=).*)", re.DOTALL)


@dataclass(frozen=True)
class Constraint:
    """A bound of a reported value.

    Args:
        metric: Name of the reported value.
        relation: "<=" or ">=".
        bound: Finite bound, itself allowed.
    """

    metric: str
    relation: str
    bound: float

    def excess(self, value: float | None) -> float:
        """How far a value is beyond the bound, in units of max(|bound|, 1): above 0 if the constraint is violated.

        Infinite for NaN and for None, a value that was not reported.
        """
        if value is None or math.isnan(value):
            return math.inf
        beyond = value - self.bound if self.relation == "<=" else self.bound - value
        return beyond / max(abs(self.bound), 1.0)

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.bound:g}"


def parse_constraints(bounds: object) -> tuple[Constraint, ...]:
    """The constraints of a study from the argument of `tune`.

    Args:
        bounds: Name of a reported value -> its bound: "<= 10" or ">= 0.8".

    Raises:
        AlgorithmError: a bound is not of this form, or not finite.
    """
    if not isinstance(bounds, Mapping):
        raise AlgorithmError(f"`constraints` must be names of reported values with bounds, {_EXAMPLE}, got {bounds!r}")
    return tuple(_constraint(metric, text) for metric, text in bounds.items())


_EXAMPLE = 'such as {"latency_ms": "<= 10"}'


def _constraint(metric: object, text: object) -> Constraint:
    found = _BOUND.fullmatch(text) if isinstance(text, str) else None
    try:
        bound = math.nan if found is None else float(found[2])
    except ValueError:
        bound = math.nan
    if not isinstance(metric, str) or not metric or found is None or not math.isfinite(bound):
        raise AlgorithmError(
            f'`constraints` must give each reported value "<=" or ">=" and a finite number, {_EXAMPLE}, '
            f"got {{{metric!r}: {text!r}}}"
        )
    return Constraint(metric, found[1], bound)


def constraint_argument(text: str) -> tuple[str, str]:
    """The name and the bound in a text such as "latency_ms <= 10".

    Raises:
        AlgorithmError: it is not of this form.
    """
    found = _NAMED_BOUND.fullmatch(text.strip())
    if found is None or not found[1]:
        raise AlgorithmError(f'a constraint must be a name, "<=" or ">=", and a number, got {text!r}')
    parse_constraints({found[1]: found[2]})
    return found[1], found[2]


def violation(constraints: Iterable[Constraint], metrics: Mapping[str, float]) -> float:
    """Sum of the excesses above 0 of reported values: 0 if the trial is feasible."""
    return sum((max(0.0, each.excess(metrics.get(each.metric))) for each in constraints), 0.0)


def unreported(constraints: Sequence[Constraint], metrics: Mapping[str, float]) -> Constraint | None:
    """The first constraint on a value that is not reported; None if all are."""
    return next((each for each in constraints if each.metric not in metrics), None)


def with_directions(objectives: Sequence[Objective], constraints: Iterable[Constraint]) -> tuple[Objective, ...]:
    """The objectives, then the values under constraints with the direction in which each is kept; see
    `lower_is_better`.
    """
    return (*objectives, *(Objective(each.metric, "min" if each.relation == "<=" else "max") for each in constraints))
