"""Ordered queue with search by requested amounts of compute, memory and cores."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Generic, TypeVar

__all__ = ["Entry", "IndexedQueue"]

T = TypeVar("T")

Entry = tuple[float, int, int, int, int, T]
"""Rank, a unique number that breaks ties, requested compute, memory and cores, and the item."""

_BLOCK = 128
"""Initial number of entries of a block; a block is split at twice as many."""

_Amounts = tuple[float, float, float]

_NO_BOUND = (float("-inf"),) * 3
"""Lower bound of all amounts."""


class IndexedQueue(Generic[T]):
    """Entries in order of their rank; finds the first one whose requested amounts are within an offer.

    The entries are in blocks, each with a lower bound of its three amounts, so a search skips whole blocks. A bound may
    be too low after an entry was removed; the first search without a match in the block makes it exact. A block starts
    at the position of its initial first entry, which may have been removed.

    Args:
        entries: Initial entries in any order.
        sorted_by_compute: Whether the order is also that of requested compute, so that the first excess ends a search.
    """

    def __init__(self, entries: Iterable[Entry[T]] = (), *, sorted_by_compute: bool = False) -> None:
        self._sorted_by_compute = sorted_by_compute
        ordered = sorted(entries)
        self._blocks = [ordered[i : i + _BLOCK] for i in range(0, len(ordered), _BLOCK)] or [[]]
        self._bounds = [_lower_bound(block) for block in self._blocks]
        self._exact = [True] * len(self._blocks)
        self._starts = [block[0][:5] for block in self._blocks[1:]]

    def first(self, compute: int, memory: int, cores: int) -> Entry[T] | None:
        """Return the first entry with no amount above these; None if there is none."""
        for index, bound in enumerate(self._bounds):
            if bound[0] > compute or bound[1] > memory or bound[2] > cores:
                if self._sorted_by_compute and bound[0] > compute:
                    return None
                continue
            for entry in self._blocks[index]:
                if entry[2] <= compute and entry[3] <= memory and entry[4] <= cores:
                    return entry
            if not self._exact[index]:
                self._bounds[index] = _lower_bound(self._blocks[index])
                self._exact[index] = True
        return None

    def replace(self, entry: Entry[T], replacement: Entry[T]) -> None:
        """Remove an existing entry, and add another one."""
        if self._starts:
            self._remove(entry)
            self._add(replacement)
            return
        block = self._blocks[0]
        del block[bisect_left(block, entry)]
        insort(block, replacement)
        self._bounds[0] = _NO_BOUND
        self._exact[0] = False

    def _add(self, entry: Entry[T]) -> None:
        index = bisect_right(self._starts, entry) if self._starts else 0
        block = self._blocks[index]
        insort(block, entry)
        bound = self._bounds[index]
        if entry[2] < bound[0] or entry[3] < bound[1] or entry[4] < bound[2]:
            self._bounds[index] = (min(bound[0], entry[2]), min(bound[1], entry[3]), min(bound[2], entry[4]))
        if len(block) > 2 * _BLOCK:
            self._split(index)

    def _remove(self, entry: Entry[T]) -> None:
        index = bisect_right(self._starts, entry)
        block = self._blocks[index]
        del block[bisect_left(block, entry)]
        self._exact[index] = False
        if not block and self._starts:
            del self._blocks[index], self._bounds[index], self._exact[index], self._starts[max(index - 1, 0)]

    def _split(self, index: int) -> None:
        left, right = self._blocks[index][:_BLOCK], self._blocks[index][_BLOCK:]
        self._blocks[index : index + 1] = [left, right]
        self._bounds[index : index + 1] = [_lower_bound(left), _lower_bound(right)]
        self._exact[index : index + 1] = [True, True]
        self._starts.insert(index, right[0][:5])


def _lower_bound(block: list[Entry[T]]) -> _Amounts:
    """Return the least of each amount in a block; infinite in an empty one."""
    if not block:
        return (float("inf"),) * 3
    return (min(entry[2] for entry in block), min(entry[3] for entry in block), min(entry[4] for entry in block))
