"""The search for the fastest of several ways to let the same lanes take turns."""

from collections.abc import Sequence
from typing import Literal

from shoal.cost.race import Race, RaceRules

__all__ = ["RULES", "ScheduleSearch", "Way"]

Way = Literal["turns", "steps", "streams"]

PROBE_SECONDS = 0.1
"""How long a probe of a way takes at least: rounds may be shorter."""

RULES = RaceRules(margin=1.03, hopeless_seconds=2 * PROBE_SECONDS)


class ScheduleSearch:
    """Finds out which way is the fastest by trying all of them in turn, with real steps only.

    Args:
        ways: to choose from; of equals the first.
        lanes: how many take turns.
    """

    def __init__(self, ways: Sequence[Way], lanes: int) -> None:
        self._race: Race[Way] = Race(ways, RULES)
        if len(ways) == 1:
            self._race.stop()
        self._seconds = 0.0
        self._taken = [0] * lanes

    @property
    def way(self) -> Way | None:
        """The fastest, or None while that is open."""
        return self._race.winner

    @property
    def seconds(self) -> dict[Way, float]:
        """By way, those that a sample takes to go through a lane, as the fastest probe showed."""
        return self._race.seconds

    def next(self) -> Way:
        """How the next round is to be."""
        return self._race.next

    def note(self, seconds: float, taken: Sequence[int]) -> None:
        """Note what a round in the `next` way showed; rounds are added up until they make a probe.

        Args:
            seconds: that it took.
            taken: samples taken in by each lane.
        """
        self._seconds += seconds
        self._taken = [before + now for before, now in zip(self._taken, taken, strict=True)]
        if min(self._taken) > 0 and self._seconds >= PROBE_SECONDS:
            self._race.note(self._seconds, sum(self._taken))
            self._seconds, self._taken = 0.0, [0] * len(self._taken)

    def __str__(self) -> str:
        return ", ".join(f"{way} {seconds * 1e6:.3g} us a sample" for way, seconds in self.seconds.items())
