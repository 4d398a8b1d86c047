"""The back end that runs jobs in the calling process: for debuggers, tests and machines with one process."""

import time
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.core.job import Job, JobUpdate
from shoal.host.process_settings import applied
from shoal.run.base import Backend, Ended, Event, Outcome, WorkerContext
from shoal.run.run_job import resolve, run_job
from shoal.train.control import JobControl

__all__ = ["Inline"]


@dataclass(frozen=True)
class _InlineJob:
    job: str
    events: Generator[Event, None, None]
    control: JobControl


class Inline(Backend):
    """Runs jobs in turn, one event for each `poll`, in the thread that calls `poll`.

    A crash of user code is a crash of the caller. `poll` runs until the next event, whatever its timeout. Several jobs
    are interleaved event by event.
    """

    concurrent = False

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        self._settings = ExitStack()  # of the study, until `close`
        self._settings.enter_context(applied(worker_context.settings))
        self._runner = resolve(worker_context.runner)
        self._runs: deque[_InlineJob] = deque()
        self._ended: list[Event] = []
        self._closed = False

    def start(self, job: Job, device: Device) -> None:
        """Add a job; a later `poll` runs its first step."""
        if self._closed:
            raise BackendError(f"job {job.id!r} cannot start: the back end is closed")
        if any(run.job == job.id for run in self._runs):
            raise BackendError(f"job {job.id!r} cannot start: a job of that id is running")
        control = JobControl(prompt=True)
        # `run_job` is a generator: the job does not run before its first event is requested.
        self._runs.append(_InlineJob(job.id, run_job(self._runner, job, device, self.worker_context, control), control))

    def stop(self, job: str) -> None:
        """Make `stopping` true for a job from its next step on."""
        for run in self._runs:
            if run.job == job:
                run.control.stop()

    def kill(self, job: str) -> None:
        """Drop a job at once; `finally` blocks of the runner still free its resources."""
        for run in [run for run in self._runs if run.job == job]:
            self._runs.remove(run)
            run.events.close()
            self._ended.append(Ended(job, Outcome.CRASHED, "was ended in the middle of its work"))

    def change(self, job: str, change: JobUpdate) -> None:
        """Pass a change to a job, for its next step."""
        for run in self._runs:
            if run.job == job:
                run.control.change(change)

    def poll(self, timeout: float) -> list[Event]:
        """Run the job at the head of the queue until its next event; without any job, sleep for the timeout."""
        if self._ended:
            events, self._ended = self._ended, []
            return events
        if not self._runs:
            if not self._closed:
                time.sleep(timeout)
            return []
        run = self._runs.popleft()
        try:
            event = next(run.events)
        except KeyboardInterrupt:
            reason = "interrupted from the keyboard in the middle of a step"
            self._ended.append(Ended(run.job, Outcome.CRASHED, reason))
            raise
        if not isinstance(event, Ended):
            self._runs.append(run)
        return [event]

    def close(self) -> None:
        """Drop all jobs at once; `finally` blocks of the runner still free their resources."""
        self._closed = True
        self._ended.clear()
        while self._runs:
            self._runs.popleft().events.close()
        self._settings.close()
