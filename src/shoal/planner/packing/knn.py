"""kNN packing: the most similar arrays share a process."""

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
"""Position of a parameter's value: its index in the order of values, or None; and a number shared by equal values."""

_Metric = Callable[[Sequence[_Place], Sequence[_Place]], float]

_ABSENT = object()


def places(configs: Sequence[Config], axes: Mapping[str, Sequence[object]]) -> list[tuple[_Place, ...]]:
    """Positions of configurations in the space of their parameters (Liu et al. 2021, section 5.2).

    Args:
        configs: Configurations.
        axes: Name of a parameter, as given by `flatten` -> its values in order. The values of other parameters are
            sorted if all are numbers.

    Returns:
        For each configuration a place for every parameter. A missing parameter counts as a value without order.
    """
    rows = [flatten(config) for config in configs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_column([row.get(name, _ABSENT) for row in rows], axes.get(name)) for name in names]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def l1(one: Sequence[_Place], other: Sequence[_Place]) -> float:
    """Sum of the distances of all parameters; the paper calls it Euclidean, but its example adds 4 and 1 to 5."""
    return sum(_apart(a, b) for a, b in zip(one, other, strict=True) if a != b)


def euclidean(one: Sequence[_Place], other: Sequence[_Place]) -> float:
    """Root of the sum of squared distances of all parameters."""
    squares = sum(_apart(a, b) ** 2 for a, b in zip(one, other, strict=True) if a != b)
    return float(squares**0.5)


def _apart(one: _Place, other: _Place) -> float:
    """Distance of two different values: difference of their indices, or 1 without an order."""
    return 1.0 if one[0] is None or other[0] is None else abs(one[0] - other[0])


def _column(values: Sequence[Any], axis: Sequence[object] | None) -> list[_Place]:
    """Places of the values of one parameter."""
    there = {_mark(value): value for value in values}
    numbers = {mark: number for number, mark in enumerate(there)}
    there.pop(_mark(_ABSENT), None)
    if axis is None and all(is_number(value) for value in there.values()):
        axis = sorted(there.values())
    index = {_mark(value): float(position) for position, value in enumerate(axis or ())}
    return [(index.get(_mark(value)), numbers[_mark(value)]) for value in values]


def _mark(value: object) -> Hashable:
    """A hashable mark that is equal for equal values: numbers may differ in type, other values may be lists."""
    return value if is_number(value) else (repr(value),)


_METRICS: Mapping[str, _Metric] = {"l1": l1, "euclidean": euclidean, "measured": l1}

_THRESHOLDS: Mapping[str, float] = {"l1": 7.0, "euclidean": 4.4, "measured": 1.0}
"""Default thresholds; the paper leaves them to the user. For distances the median of two different configurations of
its space (Table 3: 7 and the root of 19); for pack speeds 1, neither gain nor loss."""


@final
@dataclass(frozen=True)
class KNN(Packing):
    """A random array and its nearest arrays share a process, up to the memory limit and a distance; repeated.

    This is kNN Pack Hyperband (Liu et al. 2021, section 5.2). The first member represents an array.

    Args:
        threshold: Largest distance to the random array; None: 7 for "l1", 4.4 for "euclidean", 1 for "measured".
        metric: "l1" and "euclidean" compare configurations: 0 or 1 for values without an order, the difference of
            indices for others. "measured" is the pack speed of both arrays, the largest gain first; unmeasured pairs
            count as 1 and are sorted by "l1".

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
        """Draw a centroid, group it with its nearest candidates, and repeat with the rest."""
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
        """Function of a place: distance to the candidate, and a tie-breaker."""
        apart = _METRICS[self.metric]
        here, key = where[centroid], candidates[centroid].key

        def configured(place: int) -> tuple[float, float]:
            return apart(here, where[place]), 0.0

        def measured(place: int) -> tuple[float, float]:
            pack_speed = context.pack_speed(key, candidates[place].key)
            return (1.0, apart(here, where[place])) if pack_speed is None else (pack_speed, -1.0)

        return measured if self.metric == "measured" else configured
