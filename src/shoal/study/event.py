"""Events of a study other than the events of its jobs."""

from dataclasses import dataclass
from enum import Enum

from shoal.core.errors import StorageFullError, StudyMovedError
from shoal.core.event import Event as JobEvent
from shoal.core.request import Request
from shoal.study.devices import DeviceConditions

__all__ = ["Due", "Event", "Shutdown", "TrialFailed"]


class Due(Enum):
    """Periodic events; each turn of the engine's loop sends all of them, in this order."""

    CHECK = "check"
    """End jobs that hang, and jobs on lost or removed devices."""
    PROPOSE = "propose"
    """Ask the algorithm for trials."""
    PLAN = "plan"
    """Find signatures of waiting trials, profile them, and place them in jobs."""
    TIME = "time"
    """Count the time of the run; the timeout of the study may have expired."""


@dataclass(frozen=True)
class TrialFailed:
    """A trial has failed outside any job."""

    trial: int
    reason: str


@dataclass(frozen=True)
class Shutdown:
    """The study ends: jobs save their trials and stop, and their last events are recorded without further decisions.

    Args:
        record: Whether anything is recorded; it cannot be if the disk is full.
        save: Whether jobs save their trials; else they are killed, as the directory of the study is not there any more.
    """

    record: bool = True
    save: bool = True

    @staticmethod
    def after(error: BaseException) -> "Shutdown":
        """Return the shutdown of a study that an error ends."""
        is_moved = isinstance(error, StudyMovedError)
        return Shutdown(record=not is_moved and not isinstance(error, StorageFullError), save=not is_moved)


Event = JobEvent | DeviceConditions | Request | TrialFailed | Due | Shutdown
