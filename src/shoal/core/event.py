"""Events of jobs, which workers send and back ends deliver."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.trial import Report

__all__ = [
    "NOT_TRIAL_FAILURES",
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
    """How a job ended.

    Trials of a STOPPED or SUSPENDED job may go on later. All other outcomes but FINISHED mean a fault. A back end
    reports CRASHED for a job that it killed; the engine replaces it by HUNG or LOST.
    """

    FINISHED = "finished"
    STOPPED = "stopped"
    """By request, after a checkpoint."""
    SUSPENDED = "suspended"
    """As STOPPED, and another job goes on with its arrays. Back ends report STOPPED; the engine replaces it."""
    RAISED = "raised"
    """User code raised; the message holds the user's traceback."""
    CRASHED = "crashed"
    """The process died; the message names the signal or exit status, and the log."""
    OUT_OF_MEMORY = "out of memory"
    HUNG = "hung"
    """It showed no progress for too long and was killed."""
    LOST = "device lost"
    """Its device, or the service by which jobs share the device, was lost; no fault of its trials."""
    ORPHANED = "orphaned"
    """The parent of its worker died: the server of the local back end or the engine; no fault of its trials."""
    REJECTED = "rejected"
    """The task breaks its contract (TaskError), for every trial."""
    UNUSABLE = "unusable"
    """The task cannot be loaded or does not fit the checkpoints (UnusableTaskError): no trial can go on."""
    STORAGE_FULL = "storage full"


NOT_TRIAL_FAILURES = frozenset({Outcome.FINISHED, Outcome.STOPPED, Outcome.LOST, Outcome.ORPHANED})
"""Outcomes that do not count as failures of trials."""


@dataclass(frozen=True)
class TurnStats:
    """Training losses of a job in one turn on its device (Hermes: L_j(i)).

    Args:
        highest: Highest training loss.
        lowest: Lowest training loss.
        last: Newest training loss.
        steps: Number of losses, |L_j(i)|.
        seconds: Duration of the turn.
    """

    highest: float
    lowest: float
    last: float
    steps: int
    seconds: float

    def followed_by(self, later: "TurnStats | None") -> "TurnStats":
        """These statistics and later ones combined."""
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
    """Reports of trials that finished an epoch or failed; without reports, only training losses.

    Args:
        job: Id of the job.
        reports: Reports of the trials.
        losses: Training losses of the array since the last event with losses, or None. Of several members the loss of
            the best counts at each step: the value of a job is that of its best trial.
    """

    job: str
    reports: tuple[Report, ...]
    losses: TurnStats | None = None


@dataclass(frozen=True)
class SignaturesFound:
    """Fusion keys that a survey job found for its members, or another job for trials by request.

    Args:
        job: Id of the job.
        keys: Number of a trial -> its fusion key.
        alone: Numbers of trials whose models could not be surveyed; their keys are unique.
        note: Unusual property of the task that its user should know, in words; "" if there is none.
    """

    job: str
    keys: Mapping[int, FusionKey]
    alone: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Profiled:
    """Profile of an array that a profile job measured, or that a training job refined for one of its arrays.

    Args:
        job: Id of the job.
        key: Key of the array.
        profile: The profile.
        note: Reason why its trials train in plain PyTorch, for the user; "" if they are fused.
    """

    job: str
    key: FusionKey
    profile: Profile
    note: str = ""


@dataclass(frozen=True)
class PackSpeedMeasured:
    """Relative speed of the arrays of a training job, run together.

    Args:
        job: Id of the job.
        keys: Keys of its arrays.
        pace: Seconds of their steps in the fastest way, divided by the seconds of running array after array; at most 1,
            since that is one of the ways.
    """

    job: str
    keys: tuple[FusionKey, ...]
    pace: float


@dataclass(frozen=True)
class MemoryMeasured:
    """Measured memory of a training job.

    Args:
        job: Id of the job.
        members: Key of each of its arrays -> largest number of members.
        memory: Peak bytes of its process on the device (of a CPU slot: in all) since the job began.
    """

    job: str
    members: Mapping[FusionKey, int]
    memory: int


@dataclass(frozen=True)
class ArrayFailed:
    """Failure of one of a job's arrays; its trials leave the job, and the other arrays go on.

    Args:
        job: Id of the job.
        trials: Numbers of the trials of the array.
        outcome: Outcome, as of a job.
        message: Message, as of a job.
    """

    job: str
    trials: frozenset[int]
    outcome: Outcome
    message: str


@dataclass(frozen=True)
class MembersLeft:
    """Members that have left a job by request, after a checkpoint; they report no more.

    Args:
        job: Id of the job.
        trials: Numbers of the members that it still trained.
    """

    job: str
    trials: frozenset[int]


@dataclass(frozen=True)
class Heartbeat:
    """Progress of a job since its last heartbeat; at most one a second.

    Args:
        job: Id of the job.
        settled: Whether it only takes steps now, and does not prepare, build or compile anything.
    """

    job: str
    settled: bool


@dataclass(frozen=True)
class Ended:
    """End of a job, which has left its device. Exactly one for each started job, and its last event."""

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
