"""Batch-size Pack Hyperband: arrays of one batch size share a process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.groups import fill_group, ordered_groups

__all__ = ["BatchSize"]


@final
@dataclass(frozen=True)
class BatchSize(Packing):
    """Arrays of equal batch size share a process, as many as memory holds, in their order.

    This is Batch-size Pack Hyperband (Liu et al. 2021, section 5.3).
    """

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Greedy: group the first remaining candidate with all remaining ones that match and fit."""
        left = list(range(len(candidates)))
        groups: list[list[int]] = []
        while left:
            first, *others = left
            size = candidates[first].key.batch_size
            same_batch_size = (index for index in others if candidates[index].key.batch_size == size)
            groups.append(fill_group(first, same_batch_size, candidates, context))
            taken = set(groups[-1])
            left = [index for index in left if index not in taken]
        return ordered_groups(groups, candidates)
