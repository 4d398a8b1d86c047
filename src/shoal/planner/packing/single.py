"""No company."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shoal.planner.packing.base import Candidate, Packing, Scene

__all__ = ["Single"]


@final
@dataclass(frozen=True)
class Single(Packing):
    """Every array by itself: the original that Pack compares with."""

    def pack(self, candidates: Sequence[Candidate], scene: Scene) -> list[tuple[Candidate, ...]]:
        """Each in a group of its own."""
        return [(candidate,) for candidate in candidates]
