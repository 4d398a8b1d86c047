"""The search for the fastest of several ways to let the same lanes take turns."""

from collections.abc import Sequence
from typing import Literal

__all__ = ["Search", "Way"]

Way = Literal["turns", "steps", "streams"]

PROBES, PROBE_SECONDS = 3, 0.1
"""Probes of each way, and how long one takes at least; one before them is dropped: it loads kernels."""

CLEAR, CLEAR_PROBES = 1.5, 2
"""A way that is slower by this factor in so many probes is not tried again; one may have been disturbed."""

CERTAIN = 1.03
"""How many times as fast as the first way another one has to be: less is noise."""


class Search:
    """Finds out which way is the fastest by trying all of them in turn, A B C A B C, with real steps only.

    Args:
        ways: to choose from; of equals the first.
        lanes: how many take turns.
    """

    def __init__(self, ways: Sequence[Way], lanes: int) -> None:
        self.way: Way | None = ways[0] if len(ways) == 1 else None
        """The fastest, or None while that is open."""
        self._open = list(ways)
        self._probes: dict[Way, list[float]] = {way: [] for way in ways}
        self._seconds = 0.0
        self._taken = [0] * lanes

    @property
    def seconds(self) -> dict[Way, float]:
        """By way, those that a sample takes to go through a lane, as the fastest probe showed."""
        return {way: min(probes[1:]) for way, probes in self._probes.items() if len(probes) > 1}

    def next(self) -> Way:
        """How the next round is to be."""
        return self.way if self.way is not None else min(self._open, key=self._tried)

    def note(self, seconds: float, taken: Sequence[int]) -> None:
        """Note what a round in the `next` way showed.

        Args:
            seconds: that it took.
            taken: samples taken in by each lane.
        """
        self._seconds += seconds
        self._taken = [before + now for before, now in zip(self._taken, taken, strict=True)]
        way = self.next()
        first = not self._probes[way]
        if min(self._taken) > 0 and (first or self._seconds >= PROBE_SECONDS):
            self._probes[way].append(self._seconds / sum(self._taken))
            self._seconds, self._taken = 0.0, [0] * len(self._taken)
            self._judge()

    def _tried(self, way: Way) -> int:
        return len(self._probes[way])

    def _judge(self) -> None:
        """Close the ways that are known well enough, and decide when all are."""
        seconds = self.seconds
        if not seconds:
            return
        limit = CLEAR * min(seconds.values())
        self._open = [way for way in self._open if not self._known(way, seconds, limit)]
        if not self._open:
            first = next(iter(self._probes))
            costs = {way: each * (1 if way == first else CERTAIN) for way, each in seconds.items()}
            fastest: Way = min(costs, key=costs.__getitem__)
            self.way = fastest

    def _known(self, way: Way, seconds: dict[Way, float], limit: float) -> bool:
        timed = len(self._probes[way]) - 1
        return timed >= PROBES or (timed >= CLEAR_PROBES and seconds[way] > limit)

    def __str__(self) -> str:
        return ", ".join(f"{way} {seconds * 1e6:.3g} us a sample" for way, seconds in self.seconds.items())
