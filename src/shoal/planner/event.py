"""What becomes of a job: the events that workers send and back ends deliver."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal.cost.demand import Profile
from shoal.planner.job import ArrayKey
from shoal.trial import Report

__all__ = ["Ended", "Event", "Outcome", "Profiled", "Reported", "Surveyed"]


class Outcome(StrEnum):
    """How a job ended. All but FINISHED and STOPPED leave trials that did not reach their target."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """As asked, after a checkpoint."""
    RAISED = "raised"
    """User code raised; the message holds the user's traceback."""
    CRASHED = "crashed"
    """The process died; the message names the signal or exit status, and the log."""
    OUT_OF_MEMORY = "out of memory"
    REJECTED = "rejected"
    """The task breaks its contract (TaskError): every trial would."""
    STORAGE_FULL = "storage full"


@dataclass(frozen=True)
class Reported:
    """Some of a job's trials finished an epoch, or failed."""

    job: str
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Surveyed:
    """A survey job found the array keys of its members, or another job those of trials that it was asked to look at.

    Args:
        job: its id.
        keys: trial number -> array key.
        alone: numbers of trials whose models could not be looked at; their keys are nobody else's.
    """

    job: str
    keys: Mapping[int, ArrayKey]
    alone: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Profiled:
    """A profile job measured its array."""

    job: str
    profile: Profile


@dataclass(frozen=True)
class Ended:
    """A job is over and holds its device no more. Exactly one for each started job; the last event of the job."""

    job: str
    outcome: Outcome
    message: str = ""


Event = Reported | Surveyed | Profiled | Ended
