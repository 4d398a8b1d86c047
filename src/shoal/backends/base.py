"""The contract of a back end: what carries jobs to processes and their reports back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from shoal.core.device import Device
from shoal.core.event import (
    ArrayFailed,
    Ended,
    Event,
    Heartbeat,
    MembersLeft,
    MemoryMeasured,
    Outcome,
    PackSpeedMeasured,
    Profiled,
    Reported,
    SignaturesFound,
)
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.core.trial import Trial
from shoal.worker.control import JobControl
from shoal.worker.files import inherit

__all__ = [
    "ArrayFailed",
    "Backend",
    "Ended",
    "Event",
    "Heartbeat",
    "JobControl",
    "MembersLeft",
    "MemoryMeasured",
    "Outcome",
    "PackSpeedMeasured",
    "Profiled",
    "Reported",
    "Runner",
    "SignaturesFound",
    "WorkerContext",
]


Runner = Callable[[Job, Device, WorkerContext, JobControl], Iterator[Event]]
"""Does a job: `run(job, device, worker_context, control)` yields events; exceptions are the back end's to translate.

It asks `control.stopping()` between steps and, when that is true, checkpoints and returns. The back end adds `Ended`.
It calls `control.beat()` as long as it makes progress: one that stays silent for too long is killed, if it has a
process of its own. It may look for `control.changes()`; a member of theirs that it has not reported on when it returns
counts as not trained. Of those that leave while it trains them it says `MembersLeft`; until then, or its end, it has
them.
"""


class Backend(ABC):
    """Starts jobs on devices and says what became of them.

    Calls, all from one thread; none but `poll` waits for a job:

    1. The constructor, once for each run of a study; it must not wait for workers.
    2. `start` for every `StartJob`, and between two turns of the loop `change`, `stop`, `kill`, `vacate` and `inherit`
       for the other commands. A job may have ended before such a call reaches it: then the call does nothing.
    3. `poll` in each turn of the loop, until each job has `Ended`.
    4. `close`, also after an exception.

    What `poll` may return: the events of a job in the order in which its runner yielded them, none twice and none left
    out, then exactly one `Ended`, then none. Events of different jobs may be interleaved in any way.

    What may be raised: `start` a `BackendError` where the back end is closed, a job of that id runs, or the device
    cannot be used as asked; `poll` a `BackendError` where no job can run any more. A failure of user code, of a process
    or of memory ends only the job it happened in, as an `Ended` with that outcome, never as an exception of `poll`. Any
    exception ends the run.

    To suspend a job is to stop it. To resume it is to start one with its members, whose `resumes` names it: a process
    that had the first is the best place for it.

    `shoal.testing.check_backend` checks this contract. `shoal.backends.run_job.run_job` runs a job and makes its
    `Ended`.
    """

    concurrent: ClassVar[bool] = True
    """Whether jobs run at the same time, so that those on one device slow each other down."""
    elastic: ClassVar[bool] = True
    """Whether `change` reaches the jobs, and arrays may hold members that stand at different epochs."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self.worker_context = worker_context

    @property
    def starting(self) -> bool:
        """Whether what its workers need is being started or imported, so that no job can do anything yet."""
        return False

    @abstractmethod
    def start(self, job: Job, device: Device) -> None:
        """Begin a job on a device and return at once."""

    @abstractmethod
    def stop(self, job: str) -> None:
        """Ask a job to checkpoint and end; `Ended` follows. A job that has ended already is left alone."""

    @abstractmethod
    def kill(self, job: str) -> None:
        """End a job at once, without a checkpoint, whatever it is at; `Ended` follows, as of a crash.

        A job that has ended already is left alone.
        """

    def vacate(self, device: str) -> None:  # noqa: B027  (most keep nothing there)
        """Free what is kept for later jobs on a device that holds none: it is lost, or others are to have it."""

    @abstractmethod
    def change(self, job: str, change: JobUpdate) -> None:
        """Let members of a job leave, or others join. A job that has ended already is left alone."""

    def inherit(self, directory: Path, trial: Trial) -> None:
        """Give a trial that begins as a copy the checkpoint of its origin, before that one trains on.

        By default workers keep checkpoints in files below the study's directory.

        Args:
            directory: of the study.
            trial: if it has no origin, or has a checkpoint already, nothing is done.

        Raises:
            CheckpointError: the origin has no checkpoint at the end of that epoch any more, or never had one.
        """
        inherit(directory, trial)

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Events since the last call, in the order they happened; waits up to `timeout` seconds for the first."""

    @abstractmethod
    def close(self) -> None:
        """End everything that still runs, without a checkpoint, and free all processes. May be called twice."""
