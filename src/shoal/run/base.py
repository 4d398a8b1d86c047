"""The contract of a back end, which starts jobs in processes and returns their events."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from shoal.core.command import BackendCommand, KillJob, ReleaseDevice, StartJob, StopJob, UpdateJob
from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError
from shoal.core.event import (
    ArrayFailed,
    Ended,
    Event,
    Heartbeat,
    MembersLeft,
    MemoryMeasured,
    Noted,
    Outcome,
    Profiled,
    Proven,
    RelativeTimeMeasured,
    Reported,
    SignaturesFound,
    TeamMeasured,
)
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.core.trial import Trial
from shoal.host.discover import discover
from shoal.host.monitor import Monitor
from shoal.host.nvml import NvmlMonitor
from shoal.train.checkpoint_paths import copy_checkpoint, delete_checkpoints
from shoal.train.control import JobControl

__all__ = [
    "ArrayFailed",
    "Backend",
    "Ended",
    "Event",
    "Heartbeat",
    "JobControl",
    "MembersLeft",
    "MemoryMeasured",
    "Noted",
    "Outcome",
    "Profiled",
    "Proven",
    "RelativeTimeMeasured",
    "Reported",
    "Runner",
    "SignaturesFound",
    "TeamMeasured",
    "WorkerContext",
]

Runner = Callable[[Job, Device, WorkerContext, JobControl], Iterator[Event]]
"""Runs a job: `run(job, device, worker_context, control)` yields events; the back end translates exceptions.

A runner calls `control.stopping()` between steps and, if the result is true, checkpoints and returns. The back end
adds `Ended`. A runner calls `control.beat()` while it makes progress: a job in a process of its own is killed if it
is silent for too long. A runner may read `control.changes()`. A joined member without a report counts as not trained
when the runner returns. The runner yields `MembersLeft` for members that leave during training; until then, or until
the end of the job, the engine takes them to be in the job.
"""


class Backend(ABC):
    """Starts jobs on devices and returns their events.

    The engine calls, from one thread; only `poll` may wait for a job:

    1. The constructor, once for each run of a study; it must not wait for workers.
    2. `start` for every `StartJob`, and between two turns of the loop `change`, `stop`, `kill`, `release_device`,
       `copy_checkpoint` and `delete_checkpoints` for the other commands. A call for a job that has ended does nothing.
    3. `poll` in each turn of the loop, until each job has `Ended`.
    4. `close`, also after an exception.

    `poll` may return the events of a job only in the order in which its runner yielded them, each exactly once, then
    exactly one `Ended`, then no more. Events of different jobs may be interleaved in any way.

    `start` may raise a `BackendError` if the back end is closed, if a job of that id runs, or if the device cannot be
    used as requested; `poll` if no job can run any more. A failure of user code, of a process or of memory ends only
    its own job, as an `Ended` with that outcome, and is never an exception of `poll`. Any exception ends the run.

    To suspend a job, the engine stops it. To resume it, the engine starts a job with the same members, whose `resumes`
    is the id of the first job; the process of the first job is the best place for it.

    Devices belong to where jobs run. Before a study begins, `connect` and then `discover` of the class find them; while
    it runs, `find` finds those that are new, and `monitor` reports their conditions. By default all are this machine's.

    `shoal.testing.check_backend` checks this contract. `shoal.run.run_job.run_job` runs a job and makes its
    `Ended`.
    """

    concurrent: ClassVar[bool] = True
    """Whether jobs run at the same time, so that jobs on one device slow each other down."""
    elastic: ClassVar[bool] = True
    """Whether jobs receive `change`, and whether arrays may hold members at different epochs."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self.worker_context = worker_context

    @classmethod
    def connect(cls, ray_address: str | None = None, sbatch: str | None = None) -> None:
        """Connect this process to the cluster where jobs are to run; may be called again.

        Args:
            ray_address: Address of a Ray cluster; None: the one that is there.
            sbatch: Options of Slurm's `sbatch` for the nodes to ask for; None: those that are there.

        Raises:
            BackendError: There is no such cluster, or the back end has none.
        """
        for name, value, backend in (("ray_address", ray_address, "ray"), ("sbatch", sbatch, "slurm")):
            if value is not None:
                raise BackendError(f"`{name}` is for backend={backend!r}, got {value!r} with another back end")

    @classmethod
    def discover(cls, devices: str | Sequence[str]) -> Cluster:
        """Find devices before a study begins.

        Args:
            devices: As in `shoal.host.discover`.

        Raises:
            DeviceError: A device does not exist.
        """
        return discover(devices)

    def find(self, devices: str | Sequence[str]) -> Cluster:
        """Find devices while a study runs; as `discover`, but it must not wait."""
        return self.discover(devices)

    def monitor(self, cluster: Cluster) -> Monitor:
        """Return a monitor of devices."""
        return NvmlMonitor(cluster)

    @property
    def starting(self) -> bool:
        """Whether the start or the imports of the workers are under way, so that no job can make progress yet."""
        return False

    @abstractmethod
    def start(self, job: Job, device: Device) -> None:
        """Start a job on a device and return at once."""

    @abstractmethod
    def stop(self, job: str) -> None:
        """Ask a job to checkpoint and end; `Ended` follows. After the end of the job, do nothing."""

    @abstractmethod
    def kill(self, job: str) -> None:
        """End a job at once, without a checkpoint; `Ended` follows, as after a crash.

        After the end of the job, do nothing.
        """

    def can_limit_compute(self, device: Device) -> bool:
        """Return whether the processes of jobs on a device are limited to `Job.compute_limit`."""
        return False

    def release_device(self, device: str) -> None:  # noqa: B027  (most back ends keep nothing there)
        """Free the resources kept for later jobs on a device that is lost or was removed; no job runs there."""

    @abstractmethod
    def change(self, job: str, change: JobUpdate) -> None:
        """Change a job, as its update says. After the end of the job, do nothing."""

    def carry_out(self, command: BackendCommand) -> None:
        """Call the method that carries out a command of the engine.

        Raises:
            BackendError: A job cannot be started.
        """
        match command:
            case StartJob():
                self.start(command.job, command.device)
            case UpdateJob():
                self.change(command.job, command.update)
            case StopJob():
                self.stop(command.job)
            case KillJob():
                self.kill(command.job)
            case ReleaseDevice():
                self.release_device(command.device)

    def copy_checkpoint(self, directory: Path, trial: Trial) -> None:
        """Copy the checkpoint of the origin to a trial that begins as a copy, before the origin trains on.

        By default workers keep checkpoints in files below the study's directory.

        Args:
            directory: Directory of the study.
            trial: The copy; nothing is done if it has no origin, or if it has a checkpoint already.

        Raises:
            CheckpointError: The origin has no checkpoint at the end of that epoch.
        """
        copy_checkpoint(directory, trial)

    def delete_checkpoints(self, directory: Path, trial: int, *, weights: bool) -> None:
        """Delete the checkpoints of an ended trial, or only the state of its optimizers; twice has no further effect.

        Args:
            directory: Directory of the study.
            weights: Whether its weights go, too.
        """
        delete_checkpoints(directory, trial, weights=weights)

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Return the events since the last call, in their order; wait up to `timeout` seconds for the first."""

    @abstractmethod
    def close(self) -> None:
        """End all running jobs without a checkpoint, and free all processes. May be called twice."""
