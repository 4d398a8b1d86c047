"""Lanes, which take turns in a process, and their failures."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Failure", "Lane"]


class Lane(Protocol):
    """What takes turns: an array in training, with a data stream that it may share with others.

    It is known by its identity and must allow weak references.
    """

    @property
    def position(self) -> int:
        """Samples it has taken in; grows with every step. Those of lanes that come first are equal where these are
        level, such as at one place of an epoch."""

    @property
    def place(self) -> tuple[object, int] | None:
        """Where it is in the data, if it shares samples only with lanes that are at the same place: the pass that it is
        in, and samples that it has taken of that. Else None."""

    @property
    def settled(self) -> bool:
        """Whether its own search for the fastest way to step is over."""

    def advance(self) -> bool:
        """Take one step; False when that ended an epoch, or when there was nothing to do.

        On a GPU it may run on a stream of its own. That waits for all that was begun before the round, and what comes
        after the round waits for it; what lanes hand each other within a round is theirs to synchronise.
        """


@dataclass(frozen=True)
class Failure:
    """A lane that raised; the others are as if it had not been there.

    Args:
        lane: which; what a step leaves half done stays so.
        error: what it raised; `SystemExit` is as good as any other, the caller decides what it means.
    """

    lane: Lane
    error: Exception | SystemExit
