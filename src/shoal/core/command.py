"""Output of the state machine: records for the journal, and commands for the back end and the file system.

The records of a step are committed together, before any of its commands is executed. A kill between commit and
execution ends the process and all jobs. A command has a record of its own only if recovery needs one:

- `StartJob`: `JobStarted`. After a kill the job is lost, and its trials wait again.
- `UpdateJob`: `JobJoined` for trials that join. Trials that leave have ended or are paused, which `Decided`,
  `TrialsStopped` or the study's "paused_trials" record. After a kill, waiting trials are planned again and missing keys
  are requested again.
- `StopJob`: `JobLeaving` if another job takes the place. Otherwise the study's "paused_trials", "paused",
"end_requested" or "fleet"
  records the reason, or the process ends. After a kill no job starts before these are read again.
- `KillJob`: `JobKilled`, since a job that hangs fails its trials, and a job that ends with the process does not.
- `ReleaseDevice`: none. The processes that hold the device's memory end with the engine.
- `CopyCheckpoint`: `GroupsProposed`, `TrialAdded` or `Requeued`. Each waiting trial gets its copy again before any job
  starts; an existing copy is kept.
- `CloseRequest`: `Intervened`. A pending request with this record is only closed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.activity import Activity
from shoal.core.array import Array
from shoal.core.cause import Cause
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.event import Outcome, Proven, TurnStats
from shoal.core.job import Job, JobUpdate
from shoal.core.trial import Decision, Report, Trial, TrialGroup

__all__ = [
    "ArrayLeft",
    "BackendCommand",
    "CloseRequest",
    "Command",
    "CopyCheckpoint",
    "Decided",
    "DevicesChanged",
    "GroupsProposed",
    "Intervened",
    "JobEnded",
    "JobJoined",
    "JobKilled",
    "JobLeaving",
    "JobStarted",
    "KillJob",
    "QuantumMeasured",
    "Record",
    "ReleaseDevice",
    "Requeued",
    "ReservationsChanged",
    "StartJob",
    "Step",
    "StopJob",
    "StoppedOnCommonFailure",
    "StudyChanged",
    "TelemetryMeasured",
    "TrialAdded",
    "TrialsReported",
    "TrialsStopped",
    "UpdateJob",
    "Waiting",
]


@dataclass(frozen=True)
class StartJob:
    """Start a job on a device."""

    job: Job
    device: Device


@dataclass(frozen=True)
class UpdateJob:
    """Remove members from a running job, or add others."""

    job: str
    update: JobUpdate


@dataclass(frozen=True)
class StopJob:
    """Ask a job to save a checkpoint and end."""

    job: str


@dataclass(frozen=True)
class KillJob:
    """End a job at once."""

    job: str


@dataclass(frozen=True)
class ReleaseDevice:
    """Free the memory and processes kept on an idle device for later jobs."""

    device: str


@dataclass(frozen=True)
class CopyCheckpoint:
    """Copy the origin's checkpoint to a trial that starts from it, before the origin continues to train."""

    trial: Trial


@dataclass(frozen=True)
class CloseRequest:
    """Delete a user's request that is carried out or refused."""

    request: str


BackendCommand = StartJob | UpdateJob | StopJob | KillJob | ReleaseDevice
Command = BackendCommand | CopyCheckpoint | CloseRequest


@dataclass(frozen=True)
class GroupsProposed:
    """Groups that the algorithm proposed while `free` more trials could start."""

    free: int
    groups: tuple[TrialGroup, ...]


@dataclass(frozen=True)
class TrialsReported:
    """New reports of the trials of a job; job "" if the study itself fails a trial."""

    job: str
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Decided:
    """Trials that the algorithm has ended."""

    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Waiting:
    """Changed waiting reasons, by number of the trial."""

    reasons: Mapping[int, str]


@dataclass(frozen=True)
class JobStarted:
    """A job that is about to start on a device; the members of a training job become RUNNING."""

    job: Job
    device: str


@dataclass(frozen=True)
class JobJoined:
    """Arrays whose members are about to join a running job."""

    job: str
    device: str
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class ReservationsChanged:
    """Id of a job -> its new reservation."""

    demands: Mapping[str, Demand]


@dataclass(frozen=True)
class JobLeaving:
    """A job that will be asked to leave its device, with the reason."""

    job: str
    reason: str


@dataclass(frozen=True)
class JobKilled:
    """A job that is about to be killed."""

    job: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class JobEnded:
    """End of a job; its RUNNING trials wait again.

    Args:
        message: Message of the back end; "" adds nothing to the message of the job.
        failed: Whether this counts as a failure of the trials that wait again.
        activities: Seconds of the job by activity; empty if it could not report them.
    """

    job: str
    outcome: Outcome
    message: str
    failed: bool
    activities: Mapping[Activity, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ArrayLeft:
    """Trials that a job does not train any more; RUNNING ones wait again.

    Args:
        message: Reason, which is added to the message of the job.
    """

    job: str
    trials: frozenset[int]
    message: str
    failed: bool


@dataclass(frozen=True)
class DevicesChanged:
    """The present devices."""

    cluster: Cluster


@dataclass(frozen=True)
class QuantumMeasured:
    """The losses of a turn of a job.

    Args:
        number: Number of the turn, counted from 0 over all stretches of the job on devices.
    """

    job: str
    number: int
    losses: TurnStats


@dataclass(frozen=True)
class TelemetryMeasured:
    """Name of a GPU -> percent of time with a running kernel, and bytes in use; None if unknown."""

    usage: Mapping[str, tuple[int | None, int | None]]


@dataclass(frozen=True)
class StudyChanged:
    """A changed value of the study, a JSON value."""

    key: str
    value: Any


@dataclass(frozen=True)
class Requeued:
    """Failed trials that wait again with their failures cleared; other trials do not change."""

    trials: tuple[int, ...]


@dataclass(frozen=True)
class TrialAdded:
    """A trial that a user has added; it waits."""

    trial: Trial
    target: int


@dataclass(frozen=True)
class TrialsStopped:
    """Trials that become STOPPED in any state, and not by the algorithm."""

    trials: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Intervened:
    """Result of a user's request: trials and devices for which it was carried out, and refused parts, a line each."""

    request: str
    verb: str
    trials: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    text: str = ""
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoppedOnCommonFailure:
    """The study ends because its first trials failed with one cause; failures of open trials are cleared."""

    cause: Cause


Record = (
    GroupsProposed
    | TrialsReported
    | Decided
    | Waiting
    | JobStarted
    | JobJoined
    | ReservationsChanged
    | JobLeaving
    | JobKilled
    | JobEnded
    | ArrayLeft
    | DevicesChanged
    | QuantumMeasured
    | StudyChanged
    | TelemetryMeasured
    | Requeued
    | TrialAdded
    | TrialsStopped
    | Proven
    | Intervened
    | StoppedOnCommonFailure
)


@dataclass
class Step:
    """Result of one event."""

    records: list[Record] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def record(self, *records: Record) -> None:
        """Add records."""
        self.records += records

    def command(self, *commands: Command) -> None:
        """Add commands."""
        self.commands += commands
