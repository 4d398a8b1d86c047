"""What the state machine of a study wants done: records for the journal, and commands to the world around it.

The records of a step are committed together, before any of its commands is carried out. Between the two the process may
be killed, and all jobs with it. A command has a record of its own only where it would lose something otherwise:

- `StartJob`: `JobStarted`. The job is lost, and its trials wait again.
- `UpdateJob`: `JobJoined` for those that join. Those that leave are over or paused, which `Decided`, `TrialsStopped` or
  the study's "held" say. The job has ended with the process; who waits is planned for anew, and models are looked at
  again.
- `StopJob`: `JobLeaving` where another job takes the place. Otherwise the study's "held", "paused", "ended" or "fleet"
  says why, or the process ends. The job has ended, and nothing starts before the reason has been looked at again.
- `KillJob`: `JobKilled`, as a job that hangs fails its trials, and one that ends with the process does not.
- `VacateDevice`: none. What was kept on the device was kept by processes that are gone.
- `CopyCheckpoint`: none but `GroupsProposed`, `TrialAdded` or `Requeued`. Each trial that waits gets its copy again
  before anything starts; a copy that is there stays as it is.
- `CloseRequest`: `Intervened`. A pending request that has one is only closed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.array import Array
from shoal.core.cause import Cause
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.event import Outcome
from shoal.core.job import Job, JobUpdate
from shoal.core.trial import Decision, Report, Trial, TrialGroup

__all__ = [
    "ArrayLeft",
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
    "Record",
    "Requeued",
    "ReservationsChanged",
    "StartJob",
    "Step",
    "StopJob",
    "StoppedOnCommonFailure",
    "StudyChanged",
    "TrialAdded",
    "TrialsReported",
    "TrialsStopped",
    "UpdateJob",
    "VacateDevice",
    "Waiting",
]


@dataclass(frozen=True)
class StartJob:
    """Start a job on a device."""

    job: Job
    device: Device


@dataclass(frozen=True)
class UpdateJob:
    """Let members leave a running job, or others join."""

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
class VacateDevice:
    """Free what is kept for later jobs on a device that holds none."""

    device: str


@dataclass(frozen=True)
class CopyCheckpoint:
    """Give a trial that begins as a copy the checkpoint of its origin, before that one trains on."""

    trial: Trial


@dataclass(frozen=True)
class CloseRequest:
    """The request of a user is carried out or refused, and not pending any more."""

    request: str


Command = StartJob | UpdateJob | StopJob | KillJob | VacateDevice | CopyCheckpoint | CloseRequest


@dataclass(frozen=True)
class GroupsProposed:
    """The algorithm was asked for groups while `free` more trials could start, and returned these."""

    free: int
    groups: tuple[TrialGroup, ...]


@dataclass(frozen=True)
class TrialsReported:
    """Trials of a job have reported what was not known; job "" where the study itself says that a trial failed."""

    job: str
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Decided:
    """The algorithm has ended trials."""

    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Waiting:
    """Why trials wait, by number: those of which that has changed."""

    reasons: Mapping[int, str]


@dataclass(frozen=True)
class JobStarted:
    """A job is about to start on a device; the members of a training job run from now on."""

    job: Job
    device: str


@dataclass(frozen=True)
class JobJoined:
    """The members of arrays are about to join a running job."""

    job: str
    device: str
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class ReservationsChanged:
    """Id of each job -> what it is promised of its device from now on."""

    demands: Mapping[str, Demand]


@dataclass(frozen=True)
class JobLeaving:
    """A job is about to be asked to leave its device."""

    job: str
    reason: str


@dataclass(frozen=True)
class JobKilled:
    """A job is about to be killed.

    Args:
        job: its id.
        outcome: how it will have ended.
        reason: why.
    """

    job: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class JobEnded:
    """A job is over; its trials that still run wait again.

    Args:
        job: its id.
        outcome: how it ended.
        message: what was said of it; "" leaves what was noted of the job before.
        failed: whether that counts as a failure of the trials that wait again.
    """

    job: str
    outcome: Outcome
    message: str
    failed: bool


@dataclass(frozen=True)
class ArrayLeft:
    """A job trains some of its trials no more; those that still run there wait again.

    Args:
        job: its id.
        trials: their numbers.
        message: why; it is kept with the job.
        failed: as of `JobEnded`.
    """

    job: str
    trials: frozenset[int]
    message: str
    failed: bool


@dataclass(frozen=True)
class DevicesChanged:
    """These are the devices from now on."""

    cluster: Cluster


@dataclass(frozen=True)
class StudyChanged:
    """What the study is has changed in one value, a JSON value."""

    key: str
    value: Any


@dataclass(frozen=True)
class Requeued:
    """Trials that failed wait again, their failures forgotten; those that did not fail are left alone."""

    trials: tuple[int, ...]


@dataclass(frozen=True)
class TrialAdded:
    """A user has added a trial, which waits.

    Args:
        trial: a new one.
        target: epochs up to which it is to be trained.
    """

    trial: Trial
    target: int


@dataclass(frozen=True)
class TrialsStopped:
    """Trials are STOPPED, whatever they were, and not by the algorithm.

    Args:
        trials: their numbers.
        reason: why.
    """

    trials: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Intervened:
    """What came of the request of a user.

    Args:
        request: its name.
        verb: what was to be done.
        trials: numbers of those with which it was done.
        devices: names of those with which it was done.
        text: what else is to be said of what was done.
        refused: what was not done, and why, a line each.
    """

    request: str
    verb: str
    trials: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    text: str = ""
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoppedOnCommonFailure:
    """The study ends since its first trials fail alike, which does not count against those that are still open."""

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
    | StudyChanged
    | Requeued
    | TrialAdded
    | TrialsStopped
    | Intervened
    | StoppedOnCommonFailure
)


@dataclass
class Step:
    """What one event leads to.

    Args:
        records: to be committed together, in order.
        commands: to be carried out after that, in order.
    """

    records: list[Record] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def record(self, *records: Record) -> None:
        """Add records."""
        self.records += records

    def command(self, *commands: Command) -> None:
        """Add commands."""
        self.commands += commands
