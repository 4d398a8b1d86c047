"""Batch-size Pack Hyperband: arrays of one batch size share a process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.packs import fill_pack, ordered_packs

__all__ = ["BatchSize"]


@final
@dataclass(frozen=True)
class BatchSize(Packing):
    """Arrays of equal batch size share a process, as many as memory holds, in their order.

    This is Batch-size Pack Hyperband (Liu et al. 2021, section 5.3).
    """

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Greedy: pack the first remaining candidate with all remaining ones that match and fit."""
        left = list(range(len(candidates)))
        packs: list[list[int]] = []
        while left:
            first, *others = left
            size = candidates[first].key.batch_size
            same_batch_size = (index for index in others if candidates[index].key.batch_size == size)
            packs.append(fill_pack(first, same_batch_size, candidates, context))
            taken = set(packs[-1])
            left = [index for index in left if index not in taken]
        return ordered_packs(packs, candidates)
