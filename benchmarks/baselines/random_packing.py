"""Random Pack Hyperband: any arrays share a process."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import final

from shoal.core.errors import PackError
from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.packs import fill_pack, ordered_packs

__all__ = ["RandomPacking"]


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
        is_valid = isinstance(self.size, int) and not isinstance(self.size, bool) and self.size >= 1
        if self.size is not None and not is_valid:
            raise PackError(f"`size` must be an integer of at least 1, or None for no limit, got {self.size!r}")

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """In random order: pack the first remaining candidate with the following ones that fit."""
        left = list(range(len(candidates)))
        Random(context.seed).shuffle(left)
        packs: list[list[int]] = []
        while left:
            packs.append(fill_pack(left[0], left[1:], candidates, context, self.size))
            taken = set(packs[-1])
            left = [index for index in left if index not in taken]
        return ordered_packs(packs, candidates)
