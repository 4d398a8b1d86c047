"""How far apart configurations are."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shoal.core.space import flatten, is_number
from shoal.core.trial import Config

__all__ = ["Metric", "Place", "euclidean", "l1", "places"]

Place = tuple[float | None, int]
"""Of a value: its index among those in order, None where there is no order; and a number that equal ones share."""

Metric = Callable[[Sequence[Place], Sequence[Place]], float]

_ABSENT = object()


def places(configs: Sequence[Config], axes: Mapping[str, Sequence[object]]) -> list[tuple[Place, ...]]:
    """Where configurations lie in the space of their parameters (Liu et al. 2021, section 5.2).

    Args:
        configs: any; parameters that all of them agree on make no difference.
        axes: name of a parameter, as `flatten` gives it -> its values in order. Of others the values that are there
            are put in order, if all are numbers.

    Returns:
        For each configuration a place for every parameter. One that it has not is a value of its own, without order.
    """
    rows = [flatten(config) for config in configs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_column([row.get(name, _ABSENT) for row in rows], axes.get(name)) for name in names]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def l1(one: Sequence[Place], other: Sequence[Place]) -> float:
    """The sum over the parameters; the paper calls it Euclidean, but its example adds 4 and 1 to 5."""
    return sum(_apart(a, b) for a, b in zip(one, other, strict=True) if a != b)


def euclidean(one: Sequence[Place], other: Sequence[Place]) -> float:
    """The root of the sum of the squares."""
    squares = sum(_apart(a, b) ** 2 for a, b in zip(one, other, strict=True) if a != b)
    return float(squares**0.5)


def _apart(one: Place, other: Place) -> float:
    """Of two values that differ: by index where both have one, else 1."""
    return 1.0 if one[0] is None or other[0] is None else abs(one[0] - other[0])


def _column(values: Sequence[Any], axis: Sequence[object] | None) -> list[Place]:
    """The places of one parameter's values."""
    there = {_mark(value): value for value in values}
    numbers = {mark: number for number, mark in enumerate(there)}
    there.pop(_mark(_ABSENT), None)
    if axis is None and all(is_number(value) for value in there.values()):
        axis = sorted(there.values())
    index = {_mark(value): float(position) for position, value in enumerate(axis or ())}
    return [(index.get(_mark(value)), numbers[_mark(value)]) for value in values]


def _mark(value: object) -> Hashable:
    """The same for equal values, of which numbers may differ in type and others may be lists."""
    return value if is_number(value) else (repr(value),)
