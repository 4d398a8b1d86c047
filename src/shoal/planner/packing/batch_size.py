"""Equal batch sizes together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.groups import arranged, filled

__all__ = ["BatchSize"]


@final
@dataclass(frozen=True)
class BatchSize(Packing):
    """Only arrays of equal batch size share a process: as many as memory holds, in their order, then the next.

    This is Batch-size Pack Hyperband (Liu et al. 2021, section 5.3).
    """

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Greedily, the first candidate that is left with all that fit to it."""
        left = list(range(len(candidates)))
        groups: list[list[int]] = []
        while left:
            first, *others = left
            size = candidates[first].key.batch_size
            alike = (place for place in others if candidates[place].key.batch_size == size)
            groups.append(filled(first, alike, candidates, context))
            taken = set(groups[-1])
            left = [place for place in left if place not in taken]
        return arranged(groups, candidates)
