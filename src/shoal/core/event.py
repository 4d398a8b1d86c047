"""What becomes of a job: the events that workers send and back ends deliver."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.trial import Report

__all__ = [
    "BLAMELESS",
    "ArrayFailed",
    "Ended",
    "Event",
    "Heartbeat",
    "MembersLeft",
    "MemoryMeasured",
    "Outcome",
    "PackSpeedMeasured",
    "Profiled",
    "Reported",
    "SignaturesFound",
    "TurnStats",
]


class Outcome(StrEnum):
    """How a job ended. Those of a STOPPED or SUSPENDED job may go on later; after all others but FINISHED, something
    is wrong.

    A back end says CRASHED of a job that it was told to kill; the engine knows whether it was HUNG or LOST.
    """

    FINISHED = "finished"
    STOPPED = "stopped"
    """As asked, after a checkpoint."""
    SUSPENDED = "suspended"
    """Likewise, and another job will go on with its arrays; back ends say STOPPED, the engine knows what for."""
    RAISED = "raised"
    """User code raised; the message holds the user's traceback."""
    CRASHED = "crashed"
    """The process died; the message names the signal or exit status, and the log."""
    OUT_OF_MEMORY = "out of memory"
    HUNG = "hung"
    """It showed no progress for too long and was killed."""
    LOST = "device lost"
    """Its device was, or what lets it share that; no fault of its trials."""
    ORPHANED = "lost"
    """The process above its worker died, the server of the local back end or the engine; no fault of its trials."""
    REJECTED = "rejected"
    """The task breaks its contract (TaskError): every trial would."""
    UNUSABLE = "unusable"
    """The task cannot be loaded, or what trials have learnt does not fit it (UnusableTaskError): none can go on."""
    STORAGE_FULL = "storage full"


BLAMELESS = frozenset({Outcome.FINISHED, Outcome.STOPPED, Outcome.LOST, Outcome.ORPHANED})
"""Ends of jobs that are no failures of their trials."""


@dataclass(frozen=True)
class TurnStats:
    """What a job measured in one turn on its device (Hermes: L_j(i)).

    Args:
        highest: of its training losses.
        lowest: of its training losses.
        last: the newest training loss.
        steps: how many losses there were, |L_j(i)|.
        seconds: how long it took.
    """

    highest: float
    lowest: float
    last: float
    steps: int
    seconds: float

    def followed_by(self, later: "TurnStats | None") -> "TurnStats":
        """This one and a later one as one."""
        if later is None:
            return self
        return TurnStats(
            max(self.highest, later.highest),
            min(self.lowest, later.lowest),
            later.last,
            self.steps + later.steps,
            self.seconds + later.seconds,
        )


@dataclass(frozen=True)
class Reported:
    """Some of a job's trials finished an epoch, or failed; or none has, and only its losses are told.

    Args:
        job: its id.
        reports: of the trials.
        losses: training losses since the last ones that were told of this array, or None. Of several members that of
            the best one counts at each step: a job is worth as much as the best of its trials.
    """

    job: str
    reports: tuple[Report, ...]
    losses: TurnStats | None = None


@dataclass(frozen=True)
class SignaturesFound:
    """A survey job found the array keys of its members, or another job those of trials that it was asked to look at.

    Args:
        job: its id.
        keys: trial number -> array key.
        alone: numbers of trials whose models could not be looked at; their keys are nobody else's.
        note: what is unusual in the task, in words, so that its user should know; "" if nothing is.
    """

    job: str
    keys: Mapping[int, FusionKey]
    alone: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Profiled:
    """A profile job measured an array, or a training job found out more of one of its own.

    Args:
        job: its id.
        key: of the array.
        profile: what was found.
        note: why its trials train in plain PyTorch, so that the user should know; "" if they need not.
    """

    job: str
    key: FusionKey
    profile: Profile
    note: str = ""


@dataclass(frozen=True)
class PackSpeedMeasured:
    """A training job measured what its arrays cost each other.

    Args:
        job: its id.
        keys: of its arrays.
        pace: seconds that their steps take in the way that was found the fastest, over those that they take array after
            array; at most 1, as that is one of the ways.
    """

    job: str
    keys: tuple[FusionKey, ...]
    pace: float


@dataclass(frozen=True)
class MemoryMeasured:
    """A training job has seen how much memory it takes.

    Args:
        job: its id.
        members: of each of its arrays, when they were most.
        memory: bytes that its process held on the device (of a CPU slot: in all) at the peak since the job began.
    """

    job: str
    members: Mapping[FusionKey, int]
    memory: int


@dataclass(frozen=True)
class ArrayFailed:
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
class MembersLeft:
    """Members that were told to leave a job have done so, saved; they report no more.

    Args:
        job: its id.
        trials: numbers of those that it still trained.
    """

    job: str
    trials: frozenset[int]


@dataclass(frozen=True)
class Heartbeat:
    """A job has made progress since it last said so; at most once a second.

    Args:
        job: its id.
        settled: whether it only takes steps now, and does not prepare, build or compile anything.
    """

    job: str
    settled: bool


@dataclass(frozen=True)
class Ended:
    """A job is over and holds its device no more. Exactly one for each started job; the last event of the job."""

    job: str
    outcome: Outcome
    message: str = ""


Event = (
    Reported
    | SignaturesFound
    | Profiled
    | PackSpeedMeasured
    | MemoryMeasured
    | ArrayFailed
    | MembersLeft
    | Heartbeat
    | Ended
)
