"""What takes turns in a process, and one round of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Failure", "Lane", "Round"]


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


class Round:
    """Lanes on their way to a common place in the data; those furthest behind go first.

    Args:
        lanes: which take part.
        progress: how far a lane is, in samples.
        goal: a lane is through when it is so far.
        interrupted: asked after every step; True ends the round.
        advance: lets a lane take one step, as its own `advance` does.
    """

    def __init__(
        self,
        lanes: Iterable[Lane],
        progress: Callable[[Lane], int],
        goal: int,
        interrupted: Callable[[], bool],
        advance: Callable[[Lane], bool],
    ) -> None:
        self.failures: list[Failure] = []
        self.stopped = False
        self._advance = advance
        self._progress = progress
        self._goal = goal
        self._interrupted = interrupted
        self._waiting = [lane for lane in lanes if progress(lane) < goal]

    def run(self, stretch: int | None) -> None:
        """Let the lane furthest behind take some steps, then again the one that is so then, until all are through.

        Args:
            stretch: steps that a lane takes at most before another may have its turn; None: no limit.
        """
        while self._waiting and not self.stopped:
            lane = min(self._waiting, key=self._progress)
            self._waiting.remove(lane)
            taken = 0
            while self._step(lane):
                taken += 1
                if taken == stretch:
                    self._waiting.append(lane)
                    break

    def _step(self, lane: Lane) -> bool:
        """Let a lane take a step; returns whether it is to take another in this round."""
        try:
            goes_on = self._advance(lane)
        except (Exception, SystemExit) as error:  # not hidden: the caller is given it, with the lane that it belongs to
            self.failures.append(Failure(lane, error))
            goes_on = False
        if self._interrupted():
            self.stopped = True
        return goes_on and not self.stopped and self._progress(lane) < self._goal
