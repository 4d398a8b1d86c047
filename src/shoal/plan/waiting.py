"""Waiting trials as classes: trials that are alike in everything on which a plan depends."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from shoal.core.array import FusionKey, Member

__all__ = ["OutOfMemoryLimit", "WaitingClass", "round_robin"]


@dataclass(frozen=True)
class OutOfMemoryLimit:
    """Limit for a trial that ran out of memory; its array has a job of its own.

    With `memory` the job has a device of at least so many bytes to itself; else it gets its estimated demand.
    """

    max_members: int
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingClass:
    """Waiting trials of one key that train from one epoch to one other, under the same limits.

    Args:
        members: At least one, by number.
        rank: Trials of a lower rank come first in the queue, whatever their numbers.
        own_job: Whether each of them trains in a job of its own, since it failed together with others.
        oom_limit: Limit of each of them, after it ran out of memory.
        family: Key of the partially fused array in which they train; None: they train under their own key.
    """

    key: FusionKey
    members: tuple[Member, ...]
    rank: int = 0
    own_job: bool = False
    oom_limit: OutOfMemoryLimit | None = None
    family: FusionKey | None = None

    @property
    def fused_key(self) -> FusionKey:
        """Key of the arrays that hold them."""
        return self.family or self.key

    @property
    def start(self) -> int:
        """Epoch from which each of them trains."""
        return self.members[0].start

    @property
    def epochs(self) -> int:
        """Epochs that each of them trains."""
        return self.members[0].epochs

    @property
    def remaining_epochs(self) -> int:
        """Epochs that all of them train."""
        return len(self.members) * self.epochs

    @property
    def may_share_job(self) -> bool:
        """Whether its trials may train in one process with others."""
        return not self.own_job and self.oom_limit is None


def round_robin(waiting: Sequence[WaitingClass], most: int) -> list[Member]:
    """Return the first `most` members round-robin by structure: the first of each, then the second of each.

    Members of one structure come by their numbers.
    """
    by_key: dict[FusionKey, list[Member]] = {}
    for each in waiting:
        by_key.setdefault(each.key, []).extend(each.members[:most])
    turns = zip_longest(*(sorted(members, key=lambda member: member.trial.number) for members in by_key.values()))
    return [member for turn in turns for member in turn if member is not None][:most]
