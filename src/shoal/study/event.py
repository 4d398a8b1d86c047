"""What happens to a study beside what its jobs say."""

from dataclasses import dataclass
from enum import Enum

from shoal.core.event import Event as JobEvent
from shoal.core.request import Request
from shoal.study.devices import DevicesSeen

__all__ = ["Due", "Event", "TrialFailed", "WindUp"]


class Due(Enum):
    """What the passing of time leads to; each is due in every turn of the engine's loop, in this order."""

    LOOK = "look"
    """Jobs that hang, or are where they must not be, are ended."""
    ASK = "ask"
    """The algorithm is asked for trials."""
    PLAN = "plan"
    """What waits is looked at, measured and placed."""


@dataclass(frozen=True)
class TrialFailed:
    """A trial cannot go on, for a reason outside any job."""

    trial: int
    reason: str


@dataclass(frozen=True)
class WindUp:
    """The study ends, for whatever reason: jobs save their trials and end, and what they still say is only recorded.

    Args:
        record: false where the journal has no room.
    """

    record: bool = True


Event = JobEvent | DevicesSeen | Request | TrialFailed | Due | WindUp
