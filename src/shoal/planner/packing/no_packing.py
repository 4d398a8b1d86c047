"""No company."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shoal.planner.packing.base import Candidate, Packing, PackingContext

__all__ = ["NoPacking"]


@final
@dataclass(frozen=True)
class NoPacking(Packing):
    """Every array by itself: the original that Pack compares with."""

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Each in a group of its own."""
        return [(candidate,) for candidate in candidates]
