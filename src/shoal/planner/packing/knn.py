"""The most alike together."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, final

from shoal.core.errors import PackError
from shoal.core.space import flatten, is_number
from shoal.core.trial import Config
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.groups import arranged, filled

__all__ = ["KNN", "euclidean", "l1", "places"]

_Place = tuple[float | None, int]
"""Of a value: its index among those in order, None where there is no order; and a number that equal ones share."""

_Metric = Callable[[Sequence[_Place], Sequence[_Place]], float]

_ABSENT = object()


def places(configs: Sequence[Config], axes: Mapping[str, Sequence[object]]) -> list[tuple[_Place, ...]]:
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


def l1(one: Sequence[_Place], other: Sequence[_Place]) -> float:
    """The sum over the parameters; the paper calls it Euclidean, but its example adds 4 and 1 to 5."""
    return sum(_apart(a, b) for a, b in zip(one, other, strict=True) if a != b)


def euclidean(one: Sequence[_Place], other: Sequence[_Place]) -> float:
    """The root of the sum of the squares."""
    squares = sum(_apart(a, b) ** 2 for a, b in zip(one, other, strict=True) if a != b)
    return float(squares**0.5)


def _apart(one: _Place, other: _Place) -> float:
    """Of two values that differ: by index where both have one, else 1."""
    return 1.0 if one[0] is None or other[0] is None else abs(one[0] - other[0])


def _column(values: Sequence[Any], axis: Sequence[object] | None) -> list[_Place]:
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


_METRICS: Mapping[str, _Metric] = {"l1": l1, "euclidean": euclidean, "measured": l1}

_THRESHOLDS: Mapping[str, float] = {"l1": 7.0, "euclidean": 4.4, "measured": 1.0}
"""The paper leaves it to the user. Of distances the median of two different configurations of its space (Table 3: 7 and
the root of 19); of a pace what neither gains nor loses."""


@final
@dataclass(frozen=True)
class KNN(Packing):
    """A random array and those nearest to it share a process, until memory is full or they are too far; repeated.

    This is kNN Pack Hyperband (Liu et al. 2021, section 5.2). An array counts as its first member.

    Args:
        threshold: greatest distance to the random one; None: 7 for "l1", 4.4 for "euclidean", 1 for "measured".
        metric: "l1" and "euclidean" compare configurations: 0 or 1 for values without an order, the difference of their
            indices for others. "measured" is the pace of both in one process: those first that gain most, then those
            that were never measured, whose pace is taken to be 1, by their "l1".

    Raises:
        PackError: `threshold` is not a number of at least 0, or there is no such metric.
    """

    threshold: float | None = None
    metric: Literal["l1", "euclidean", "measured"] = "l1"

    def __post_init__(self) -> None:
        if self.metric not in _METRICS:
            raise PackError(f"`metric` must be one of {', '.join(_METRICS)}, got {self.metric!r}")
        threshold = self.threshold
        if threshold is not None and not (isinstance(threshold, int | float) and threshold >= 0):
            raise PackError(f"`threshold` must be a number of at least 0, or None, got {threshold!r}")

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Draw a centroid, give it its nearest, and go on with those that are left."""
        where = places([candidate.array.members[0].trial.config for candidate in candidates], context.axes)
        threshold = _THRESHOLDS[self.metric] if self.threshold is None else self.threshold
        generator = Random(context.seed)
        left = list(range(len(candidates)))
        groups: list[list[int]] = []
        while left:
            centroid = left.pop(generator.randrange(len(left)))
            far = self._distance(centroid, candidates, context, where)
            same = [place for place in left if candidates[place].key.data == candidates[centroid].key.data]
            ranks = [(*far(place), place) for place in same]
            near = sorted(rank for rank in ranks if rank[0] <= threshold)
            groups.append(filled(centroid, (place for _, _, place in near), candidates, context))
            taken = set(groups[-1])
            left = [place for place in left if place not in taken]
        return arranged(groups, candidates)

    def _distance(
        self,
        centroid: int,
        candidates: Sequence[Candidate],
        context: PackingContext,
        where: Sequence[tuple[_Place, ...]],
    ) -> Callable[[int], tuple[float, float]]:
        """Distance to a candidate, and what comes first of those at the same distance."""
        apart = _METRICS[self.metric]
        here, key = where[centroid], candidates[centroid].key

        def configured(place: int) -> tuple[float, float]:
            return apart(here, where[place]), 0.0

        def measured(place: int) -> tuple[float, float]:
            pack_speed = context.pack_speed(key, candidates[place].key)
            return (1.0, apart(here, where[place])) if pack_speed is None else (pack_speed, -1.0)

        return measured if self.metric == "measured" else configured
