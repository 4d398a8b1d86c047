"""kNN Pack Hyperband: arrays of the nearest configurations share a process (Liu et al. 2021, section 5.2)."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, final

from shoal.core.errors import PackError
from shoal.core.space import flatten, is_number
from shoal.core.trial import Config
from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.packs import fill_pack, ordered_packs

__all__ = ["KNN", "euclidean", "l1", "positions"]

_Position = tuple[float | None, int]
"""Position of a parameter's value: the index in the order of values, None without an order; a number of the value."""

_Metric = Callable[[Sequence[_Position], Sequence[_Position]], float]

_ABSENT = object()


def positions(configs: Sequence[Config], axes: Mapping[str, Sequence[object]]) -> list[tuple[_Position, ...]]:
    """Return the positions of configurations in the space of their parameters (Liu et al. 2021, section 5.2).

    Args:
        configs: Configurations.
        axes: Name of a parameter, as given by `flatten` -> its values in order. The values of other parameters are
            sorted if all are numbers.

    Returns:
        The position of every parameter, for each configuration. A missing parameter counts as a value without order.
    """
    rows = [flatten(config) for config in configs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_parameter_positions([row.get(name, _ABSENT) for row in rows], axes.get(name)) for name in names]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def l1(one: Sequence[_Position], other: Sequence[_Position]) -> float:
    """Return the sum of the distances of all parameters.

    The paper calls this distance Euclidean, but adds the distances 4 and 1 to 5 in its example.
    """
    return sum(_distance_of(a, b) for a, b in zip(one, other, strict=True) if a != b)


def euclidean(one: Sequence[_Position], other: Sequence[_Position]) -> float:
    """Return the root of the sum of squared distances of all parameters."""
    squares = sum(_distance_of(a, b) ** 2 for a, b in zip(one, other, strict=True) if a != b)
    return float(squares**0.5)


def _distance_of(one: _Position, other: _Position) -> float:
    """Return the distance of two different values: difference of their indices, or 1 without an order."""
    return 1.0 if one[0] is None or other[0] is None else abs(one[0] - other[0])


def _parameter_positions(values: Sequence[Any], axis: Sequence[object] | None) -> list[_Position]:
    """Return the positions of the values of one parameter."""
    values_by_mark = {_hashable(value): value for value in values}
    numbers = {mark: number for number, mark in enumerate(values_by_mark)}
    values_by_mark.pop(_hashable(_ABSENT), None)
    if axis is None and all(is_number(value) for value in values_by_mark.values()):
        axis = sorted(values_by_mark.values())
    index = {_hashable(value): float(position) for position, value in enumerate(axis or ())}
    return [(index.get(_hashable(value)), numbers[_hashable(value)]) for value in values]


def _hashable(value: object) -> Hashable:
    """Return a hashable mark that is equal for equal values: numbers may differ in type, other values may be lists."""
    return value if is_number(value) else (repr(value),)


_METRICS: Mapping[str, _Metric] = {"l1": l1, "euclidean": euclidean, "measured": l1}

_THRESHOLDS: Mapping[str, float] = {"l1": 7.0, "euclidean": 4.4, "measured": 1.0}
"""Default thresholds, which the paper does not give. For "l1" and "euclidean": the median distance of two different
configurations of the paper's space (Table 3), 7 and the root of 19. For "measured": 1, neither gain nor loss."""


@final
@dataclass(frozen=True)
class KNN(Packing):
    """A random array and the arrays nearest to it share a process; the rest is packed in the same way.

    This is kNN Pack Hyperband (Liu et al. 2021, section 5.2). The distance of two arrays is that of their first
    members. Memory and a largest distance limit a pack.

    Args:
        threshold: Largest distance to the random array; None: 7 for "l1", 4.4 for "euclidean", 1 for "measured".
        metric: "l1" and "euclidean" add the distances of all parameters: 0 or 1 for values without an order, the
            difference of their indices for others. "measured" is the relative time of both arrays, the largest gain
            first; unmeasured pairs count as 1 and are sorted by "l1".

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
        """Draw a centroid, pack it with its nearest candidates, and repeat with the rest."""
        configs_positions = positions(
            [candidate.array.members[0].trial.config for candidate in candidates], context.axes
        )
        threshold = _THRESHOLDS[self.metric] if self.threshold is None else self.threshold
        generator = Random(context.seed)
        left = list(range(len(candidates)))
        packs: list[list[int]] = []
        while left:
            centroid = left.pop(generator.randrange(len(left)))
            distance_to = self._distance(centroid, candidates, context, configs_positions)
            same_data = [index for index in left if candidates[index].key.data == candidates[centroid].key.data]
            ranks = [(*distance_to(index), index) for index in same_data]
            nearest = sorted(rank for rank in ranks if rank[0] <= threshold)
            packs.append(fill_pack(centroid, (index for _, _, index in nearest), candidates, context))
            taken = set(packs[-1])
            left = [index for index in left if index not in taken]
        return ordered_packs(packs, candidates)

    def _distance(
        self,
        centroid: int,
        candidates: Sequence[Candidate],
        context: PackingContext,
        configs_positions: Sequence[tuple[_Position, ...]],
    ) -> Callable[[int], tuple[float, float]]:
        """Return the function from the index of a candidate to its distance from the centroid, and a tie-breaker."""
        distance = _METRICS[self.metric]
        centroid_position, key = configs_positions[centroid], candidates[centroid].key

        def by_config(index: int) -> tuple[float, float]:
            return distance(centroid_position, configs_positions[index]), 0.0

        def by_relative_time(index: int) -> tuple[float, float]:
            relative_time = context.relative_time(key, candidates[index].key)
            if relative_time is None:
                return 1.0, distance(centroid_position, configs_positions[index])
            return relative_time, -1.0

        return by_relative_time if self.metric == "measured" else by_config
