"""Events of a study beside those of its jobs."""

from dataclasses import dataclass
from enum import Enum

from shoal.core.event import Event as JobEvent
from shoal.core.request import Request
from shoal.study.devices import DevicesSeen

__all__ = ["Due", "Event", "TrialFailed", "WindUp"]


class Due(Enum):
    """Periodic events; each turn of the engine's loop sends all of them, in this order."""

    LOOK = "look"
    """End jobs that hang, and jobs on lost or removed devices."""
    ASK = "ask"
    """Ask the algorithm for trials."""
    PLAN = "plan"
    """Survey, measure and place waiting trials."""


@dataclass(frozen=True)
class TrialFailed:
    """A trial cannot go on, for a reason outside any job."""

    trial: int
    reason: str


@dataclass(frozen=True)
class WindUp:
    """The study ends: jobs save their trials and end, and their last events are only recorded.

    Args:
        record: False if the journal has no room.
    """

    record: bool = True


Event = JobEvent | DevicesSeen | Request | TrialFailed | Due | WindUp
