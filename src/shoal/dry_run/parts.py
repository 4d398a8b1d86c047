"""Where the time of one epoch goes: for trials one after another, as one array, or as lanes of one process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.core.demand import Profile
from shoal.cost.estimate import first_fetching, seconds
from shoal.planner.grouping import START_SECONDS

__all__ = ["Parts", "epoch", "job", "percent", "saved", "together", "total"]


@dataclass(frozen=True)
class Parts:
    """Seconds by what they are spent on.

    Args:
        steps: training and validation.
        preprocessing: fetching samples and preparing them.
        switching: what a change to another model costs beside that: building, moving, the first step; and jobs' starts.
    """

    steps: float = 0.0
    preprocessing: float = 0.0
    switching: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.steps + self.preprocessing + self.switching


def epoch(profile: Profile, members: int, switching: float) -> Parts:
    """Of members that train one epoch as one array, the first in a process.

    Args:
        profile: of their structure.
        members: how many.
        switching: seconds, measured.
    """
    return Parts(seconds(profile, [1] * members), first_fetching(profile), switching)


def job(parts: Parts) -> Parts:
    """With what starting a job of them costs."""
    return replace(parts, switching=START_SECONDS + parts.switching)


def total(parts: Iterable[Parts]) -> Parts:
    """One after another, nothing shared: T_s(Seq) of Pack."""
    some = list(parts)
    return Parts(
        sum(each.steps for each in some),
        sum(each.preprocessing for each in some),
        sum(each.switching for each in some),
    )


def together(parts: Sequence[Parts], pace: float, fetches: float) -> Parts:
    """As lanes of one process: T_s(Pack).

    Args:
        parts: of each lane by itself.
        pace: their steps in one process over the same steps lane after lane, measured.
        fetches: how often a sample is fetched for all of them together.
    """
    some = total(parts)
    return Parts(pace * some.steps, fetches * max(each.preprocessing for each in parts), some.switching)


def saved(apart: Parts, other: Parts) -> float:
    """IMPV of Pack, (T_s(Seq) - T_s(Pack)) / T_s(Seq): the part of the time that is saved; below 0 where it is lost."""
    return (apart.seconds - other.seconds) / apart.seconds if apart.seconds else 0.0


def percent(part: float) -> str:
    """0.31 as 31 %."""
    return f"{round(100 * part)} %"
