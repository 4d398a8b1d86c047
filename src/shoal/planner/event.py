"""What becomes of a job: the events that workers send and back ends deliver."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal.cost.demand import Profile
from shoal.planner.job import ArrayKey
from shoal.trial import Report

__all__ = ["Dropped", "Ended", "Event", "Outcome", "Paced", "Profiled", "Reported", "Surveyed"]


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
    """A profile job measured an array, or a training job found out more of one of its own."""

    job: str
    key: ArrayKey
    profile: Profile


@dataclass(frozen=True)
class Paced:
    """A training job measured what its arrays cost each other.

    Args:
        job: its id.
        keys: of its arrays.
        pace: seconds that their steps take in the way that was found the fastest, over those that they take array after
            array; at most 1, as that is one of the ways.
    """

    job: str
    keys: tuple[ArrayKey, ...]
    pace: float


@dataclass(frozen=True)
class Dropped:
    """One of a job's arrays failed; its trials are not trained there any more, and those of the others go on.

    Args:
        job: its id.
        trials: their numbers.
        outcome: as if it had been a job's.
        message: likewise.
    """

    job: str
    trials: frozenset[int]
    outcome: Outcome
    message: str


@dataclass(frozen=True)
class Ended:
    """A job is over and holds its device no more. Exactly one for each started job; the last event of the job."""

    job: str
    outcome: Outcome
    message: str = ""


Event = Reported | Surveyed | Profiled | Paced | Dropped | Ended
