"""Packings that Pack compares with (Liu et al. 2021, sections 5.2, 5.3): at random, by batch size, by likeness."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, final

from shoal.core.space import flatten, is_number
from shoal.core.trial import Config
from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.packs import fill_pack, ordered_packs

__all__ = ["KNN", "BatchSize", "RandomPacking", "distance", "positions"]

_Packs = list[tuple[Candidate, ...]]


def _greedy(order: Sequence[int], fill: Callable[[int, list[int]], list[int]]) -> Iterator[list[int]]:
    """Yield a pack of the first candidate that is left and of others, until none is left."""
    left = list(order)
    while left:
        pack = fill(left[0], left[1:])
        yield pack
        left = [index for index in left if index not in set(pack)]


def _shuffled(candidates: Sequence[Candidate], context: PackingContext) -> list[int]:
    return Random(context.seed).sample(range(len(candidates)), len(candidates))


@final
@dataclass(frozen=True)
class BatchSize(Packing):
    """Batch-size Pack Hyperband: arrays of equal batch size share a process, as many as memory holds."""

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> _Packs:
        """Greedy: pack the first remaining candidate with all remaining ones that match and fit."""
        sizes = [candidate.key.batch_size for candidate in candidates]

        def fill(first: int, others: list[int]) -> list[int]:
            return fill_pack(first, (index for index in others if sizes[index] == sizes[first]), candidates, context)

        return ordered_packs(_greedy(range(len(candidates)), fill), candidates)


@final
@dataclass(frozen=True)
class RandomPacking(Packing):
    """Random Pack Hyperband: random arrays share a process.

    Args:
        size: Largest number of arrays of a process, the paper's m; None: as many as memory holds.
    """

    size: int | None = None

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> _Packs:
        """In random order: pack the first remaining candidate with the following ones that fit."""

        def fill(first: int, others: list[int]) -> list[int]:
            return fill_pack(first, others, candidates, context, self.size)

        return ordered_packs(_greedy(_shuffled(candidates, context), fill), candidates)


_Position = tuple[float | None, object]
"""Position of a parameter's value: the index in the order of values, None without an order; and the value."""


def positions(configs: Sequence[Config], axes: Mapping[str, Sequence[object]]) -> list[tuple[_Position, ...]]:
    """Return the positions of configurations in the space of their parameters (Liu et al. 2021, section 5.2).

    Args:
        configs: Configurations.
        axes: Name of a parameter, as given by `flatten` -> its values in order. The values of other parameters are
            sorted if all are numbers.

    Returns:
        The position of every parameter, for each configuration. A missing parameter counts as a value without order.
    """
    rows = [{name: _hashable(value) for name, value in flatten(config).items()} for config in configs]
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = {row[name] for row in rows if name in row}
        ordered = sorted(values) if all(map(is_number, values)) else []
        axis = [_hashable(value) for value in axes[name]] if name in axes else ordered
        index = {value: float(position) for position, value in enumerate(axis)}
        columns.append([(index.get(row.get(name)), row.get(name)) for row in rows])
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _hashable(value: object) -> Any:
    """Return a hashable mark that is equal for equal values: numbers may differ in type, other values may be lists."""
    return value if is_number(value) else (repr(value),)


def distance(one: Sequence[_Position], other: Sequence[_Position]) -> float:
    """Return the sum of the differences of all parameters' indices; without an order, another value counts 1.

    The paper calls this distance Euclidean, but adds the distances 4 and 1 to 5 in its example.
    """
    pairs = [(a, b) for (a, value), (b, another) in zip(one, other, strict=True) if value != another]
    return sum(1.0 if a is None or b is None else abs(a - b) for a, b in pairs)


@final
@dataclass(frozen=True)
class KNN(Packing):
    """kNN Pack Hyperband: a random array and the arrays nearest to it share a process; the rest is packed likewise.

    The distance of two arrays is that of their first members. Memory and a largest distance limit a pack.

    Args:
        threshold: Largest distance to the random array, which the paper does not give; None: for "l1" the median of
            two different configurations of the paper's space (Table 3), 7; for "measured" 1, neither gain nor loss.
        metric: "l1", or "measured": the relative time of both arrays, the largest gain first; unmeasured pairs count
            as 1 and are sorted by "l1".
    """

    threshold: float | None = None
    metric: Literal["l1", "measured"] = "l1"

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> _Packs:
        """Draw a centroid, pack it with its nearest candidates, and repeat with the rest."""
        places = positions([candidate.array.members[0].trial.config for candidate in candidates], context.axes)
        default = 7.0 if self.metric == "l1" else 1.0
        threshold = default if self.threshold is None else self.threshold

        def rank(centroid: int, index: int) -> tuple[float, float, int]:
            apart = distance(places[centroid], places[index])
            if self.metric == "l1":
                return apart, 0.0, index
            relative_time = context.relative_time(candidates[centroid].key, candidates[index].key)
            return (1.0, apart, index) if relative_time is None else (relative_time, -1.0, index)

        def fill(centroid: int, others: list[int]) -> list[int]:
            ranks = sorted(rank(centroid, index) for index in others)
            return fill_pack(centroid, (each[-1] for each in ranks if each[0] <= threshold), candidates, context)

        return ordered_packs(_greedy(_shuffled(candidates, context), fill), candidates)
