"""The most alike together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, final

from shoal.core.errors import PackError
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.distance import Metric, Place, euclidean, l1, places
from shoal.planner.packing.groups import arranged, filled

__all__ = ["KNN"]

_METRICS: Mapping[str, Metric] = {"l1": l1, "euclidean": euclidean, "measured": l1}

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
        where: Sequence[tuple[Place, ...]],
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
