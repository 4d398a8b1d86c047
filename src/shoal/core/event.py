"""Events of jobs. Workers send them, and back ends deliver them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite

from shoal.core.activity import Activity
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.trial import Check, Report

__all__ = [
    "NOT_TRIAL_FAILURES",
    "ArrayFailed",
    "Ended",
    "EpochProgress",
    "Event",
    "Heartbeat",
    "MembersLeft",
    "MemoryMeasured",
    "Noted",
    "Outcome",
    "Profiled",
    "Proven",
    "RelativeTimeMeasured",
    "Reported",
    "SignaturesFound",
    "TeamMeasured",
    "TurnStats",
]


class Outcome(StrEnum):
    """Outcome of a job.

    Trials of a STOPPED or SUSPENDED job may continue later. Every other outcome except FINISHED is a fault. A back end
    reports CRASHED for a job that it killed; the engine replaces it by HUNG or LOST.
    """

    FINISHED = "finished"
    STOPPED = "stopped"
    """By request, after a checkpoint."""
    SUSPENDED = "suspended"
    """As STOPPED, but another job continues its arrays. Back ends report STOPPED; the engine replaces it."""
    RAISED = "raised"
    """User code raised; the message holds the user's traceback."""
    CRASHED = "crashed"
    """The process died; the message names the signal or exit status, and the log."""
    OUT_OF_MEMORY = "out of memory"
    HUNG = "hung"
    """It showed no progress for too long and was killed."""
    LOST = "device lost"
    """Its device, or the service by which jobs share the device, was lost; its trials are not at fault."""
    ORPHANED = "orphaned"
    """The parent of its worker died: the server of the local back end or the engine. Its trials are not at fault."""
    REJECTED = "rejected"
    """The task breaks its contract (TaskError), for every trial."""
    UNUSABLE = "unusable"
    """The task cannot be loaded or does not fit the checkpoints (UnusableTaskError): no trial can continue."""
    STORAGE_FULL = "storage full"


NOT_TRIAL_FAILURES = frozenset({Outcome.FINISHED, Outcome.STOPPED, Outcome.LOST, Outcome.ORPHANED})
"""Outcomes that do not count as failures of trials."""


@dataclass(frozen=True)
class TurnStats:
    """Training losses of a job in one turn on its device (Hermes: `L_j(i)`).

    Losses that are missing or not finite do not count. A turn in which no loss counts has infinite losses.

    Args:
        last: Newest loss.
        steps: Number of losses, `|L_j(i)|`.
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
        if isfinite(self.lowest) != isfinite(later.lowest):
            finite = self if isfinite(self.lowest) else later
            return replace(finite, seconds=self.seconds + later.seconds)
        return TurnStats(
            max(self.highest, later.highest),
            min(self.lowest, later.lowest),
            later.last,
            self.steps + later.steps,
            self.seconds + later.seconds,
        )


@dataclass(frozen=True)
class EpochProgress:
    """Steps that trials of an array have taken of the epoch that they train now.

    Args:
        trials: Their numbers.
        epoch: Number of the epoch, from 1 on; the least, if they are at different ones.
        step: Steps that each trial has taken; batches, if their steps have different numbers of these.
        steps: Steps of the epoch.
        loss: Newest training loss, the least of the trials; None if none is finite.
        steps_per_second: Recent mean; before the fastest step mode is found, as profiled, or None without a profile.
    """

    trials: tuple[int, ...]
    epoch: int
    step: int
    steps: int
    loss: float | None
    steps_per_second: float | None

    @property
    def epochs(self) -> float:
        """Epochs of the trials together, as a part of each is done."""
        return len(self.trials) * self.step / self.steps

    @property
    def epochs_per_second(self) -> float:
        """Epochs of the trials together that are trained in a second."""
        return len(self.trials) * (self.steps_per_second or 0.0) / self.steps


@dataclass(frozen=True)
class Reported:
    """Reports of trials that finished an epoch or failed; without reports, only training losses.

    Args:
        losses: Training losses of the array since the last event with losses, or None. Of several members, each
            step counts the least loss, because the value of a job is that of its best trial.
        ended_by: Number of the trial whose program ends the study: no trial begins after the running ones.
        progress: How far an array is in an epoch, once a second while it trains.
    """

    job: str
    reports: tuple[Report, ...]
    losses: TurnStats | None = None
    ended_by: int | None = None
    progress: EpochProgress | None = None


@dataclass(frozen=True)
class SignaturesFound:
    """Fusion keys that a signature job found for its members, or that a training job found on request.

    Args:
        keys: Number of a trial -> its fusion key.
        alone: Number of each trial whose model could not be built, and why, in a line; its key is unique.
        note: A text for the user on an unusual property of the task; "" if there is none.
    """

    job: str
    keys: Mapping[int, FusionKey]
    alone: Mapping[int, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Profiled:
    """Profile of an array that a profile job measured, or that a training job refined for one of its arrays.

    Args:
        compute_limit: `Job.compute_limit` as it held for its process; None: all of the compute.
    """

    job: str
    key: FusionKey
    profile: Profile
    compute_limit: float | None = None


@dataclass(frozen=True)
class Proven:
    """Result of comparing trials of an array with the same trials in plain PyTorch, or why they train in it.

    Args:
        trials: Number of each trial of the array -> epochs that it had finished.
        checks: Comparisons since the last such event of the array, equal but for rounding.
        refusal: Reason why the trials train in plain PyTorch from now on; "" if they continue as an array.
        step: Steps of the epoch that they had taken when they were refused.
    """

    job: str
    key: FusionKey
    trials: Mapping[int, int]
    checks: tuple[Check, ...] = ()
    refusal: str = ""
    step: int = 0


@dataclass(frozen=True)
class RelativeTimeMeasured:
    """Measured time of the arrays of a training job when packed, relative to running one after another.

    Args:
        relative_time: Seconds of their steps in the fastest interleaving, divided by the seconds of running array after
            array; at most 1, since that is one of the interleavings.
    """

    job: str
    keys: tuple[FusionKey, ...]
    relative_time: float


@dataclass(frozen=True)
class TeamMeasured:
    """Measured seconds of a training step of an array by its number of devices.

    Args:
        seconds: Number of devices -> median seconds of a step; 1 is among them, unless there is a note.
        note: Reason why the steps of the array cannot be divided between devices; "" if they can.
    """

    job: str
    key: FusionKey
    members: int
    seconds: Mapping[int, float]
    note: str = ""


@dataclass(frozen=True)
class MemoryMeasured:
    """Measured memory of a training job.

    Args:
        members: Key of each of its arrays -> largest number of members.
        memory: Peak bytes of its process on the device (of a CPU slot: in all) since the job began.
    """

    job: str
    members: Mapping[FusionKey, int]
    memory: int


@dataclass(frozen=True)
class ArrayFailed:
    """Failure of one array of a job. Its trials leave the job; the other arrays continue."""

    job: str
    trials: frozenset[int]
    outcome: Outcome
    message: str


@dataclass(frozen=True)
class MembersLeft:
    """Members that have left a job on request, after a checkpoint. They send no further reports."""

    job: str
    trials: frozenset[int]


@dataclass(frozen=True)
class Noted:
    """A text of a job for the user; of texts that differ only in numbers the first is shown."""

    job: str
    note: str


@dataclass(frozen=True)
class Heartbeat:
    """Progress of a job since its last heartbeat; at most one a second.

    Args:
        settled: Whether it takes steps now; otherwise it loads data, builds models or compiles.
    """

    job: str
    settled: bool


@dataclass(frozen=True)
class Ended:
    """End of a job, which has left its device. Exactly one for each started job, and its last event.

    Args:
        activities: Seconds of the job by activity, without the time that its events took to the engine; empty if the
            job could not report them.
    """

    job: str
    outcome: Outcome
    message: str = ""
    activities: Mapping[Activity, float] = field(default_factory=dict, compare=False)


Event = (
    Reported
    | SignaturesFound
    | Profiled
    | Proven
    | RelativeTimeMeasured
    | MemoryMeasured
    | TeamMeasured
    | ArrayFailed
    | MembersLeft
    | Noted
    | Heartbeat
    | Ended
)
