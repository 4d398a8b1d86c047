"""Baseline packings of Pack: none, by batch size, and random (Liu et al. 2021, section 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random as Generator
from typing import final

from shoal.core.errors import PackError
from shoal.planner.packing.base import Candidate, Packing, PackingContext
from shoal.planner.packing.groups import arranged, filled

__all__ = ["BatchSize", "NoPacking", "RandomPacking"]


@final
@dataclass(frozen=True)
class NoPacking(Packing):
    """Every array in a process of its own: the unpacked search that Pack compares with."""

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """One group per candidate."""
        return [(candidate,) for candidate in candidates]


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
            alike = (place for place in others if candidates[place].key.batch_size == size)
            groups.append(filled(first, alike, candidates, context))
            taken = set(groups[-1])
            left = [place for place in left if place not in taken]
        return arranged(groups, candidates)


@final
@dataclass(frozen=True)
class RandomPacking(Packing):
    """Random arrays share a process, as many as memory holds, or at most `size`.

    This is Random Pack Hyperband (Liu et al. 2021, section 5.3).

    Args:
        size: Largest number of arrays of a process, the paper's m; None: as many as fit.

    Raises:
        PackError: `size` is not an integer of at least 1.
    """

    size: int | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.size, int) and not isinstance(self.size, bool) and self.size >= 1
        if self.size is not None and not whole:
            raise PackError(f"`size` must be an integer of at least 1, or None for no limit, got {self.size!r}")

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """In random order: group the first remaining candidate with the following ones that fit."""
        left = list(range(len(candidates)))
        Generator(context.seed).shuffle(left)
        groups: list[list[int]] = []
        while left:
            groups.append(filled(left[0], left[1:], candidates, context, self.size))
            taken = set(groups[-1])
            left = [place for place in left if place not in taken]
        return arranged(groups, candidates)
