"""Output of the state machine: rows for the journal, and commands for the back end and the file system.

The rows of a step are committed together, before any of its commands is executed. A kill between commit and execution
ends the process and all jobs. So after it no job runs, trials that the rows call RUNNING wait again, and each trial
that waits gets its copy of a checkpoint again before any job starts; an existing copy is kept. A job that is about to
be killed has its kill in its row, since a job that hangs fails its trials, and a job that ends with the process does
not. A pending request whose result is a row is only closed. The deletions of the last step that has some are repeated.
"""

from dataclasses import dataclass, field

from shoal.core.device import Device
from shoal.core.job import Job, JobUpdate
from shoal.core.rows import Row
from shoal.core.trial import Trial

__all__ = [
    "BackendCommand",
    "CloseRequest",
    "Command",
    "CopyCheckpoint",
    "DeleteCheckpoints",
    "KillJob",
    "ReleaseDevice",
    "StartJob",
    "Step",
    "StopJob",
    "UpdateJob",
]


@dataclass(frozen=True)
class StartJob:
    """Start a job on a device."""

    job: Job
    device: Device


@dataclass(frozen=True)
class UpdateJob:
    """Change a running job."""

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
class DeleteCheckpoints:
    """Delete checkpoints of an ended trial, as `Deletion` records them; what is gone already is no error."""

    trial: int
    weights: bool


@dataclass(frozen=True)
class CloseRequest:
    """Delete a user's request that is carried out or refused."""

    request: str


BackendCommand = StartJob | UpdateJob | StopJob | KillJob | ReleaseDevice
Command = BackendCommand | CopyCheckpoint | DeleteCheckpoints | CloseRequest


@dataclass
class Step:
    """Result of one event.

    Args:
        time: Time of the event, in seconds since 1970, for its rows.
    """

    time: float = 0.0
    rows: list[Row] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def write(self, *rows: Row) -> None:
        """Add rows."""
        self.rows += rows

    def command(self, *commands: Command) -> None:
        """Add commands."""
        self.commands += commands
