"""Runs one job from its first event to its `Ended`, in any process."""

import importlib
from collections.abc import Generator, Iterator

from shoal.core.activity import Activity
from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.core.job import Job, Purpose, log_path
from shoal.host.activity_clock import ActivityClock
from shoal.run.base import Ended, Event, Outcome, Runner, WorkerContext
from shoal.train.control import JobControl
from shoal.train.failures import record_failure

__all__ = ["resolve", "run_job"]

_USUAL = {
    Purpose.TRAIN: Activity.STEPS,
    Purpose.SIGNATURE: Activity.SIGNATURE,
    Purpose.PROFILE: Activity.PROFILE,
    Purpose.ASSIST: Activity.STEPS,
}
"""Activity of a job that does none of the others."""


def resolve(path: str) -> Runner:
    """Import the runner that "module:function" names; BackendError if there is none."""
    module, _, function = path.partition(":")
    if not module or not function:
        raise BackendError(f'a runner is given as "module:function", got {path!r}')
    try:
        runner: Runner = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise BackendError(f"runner {path!r} cannot be imported: {error}") from error
    if not callable(runner):
        raise BackendError(f"runner {path!r} cannot be called, it is of type {type(runner).__name__}")
    return runner


def run_job(
    runner: Runner,
    job: Job,
    device: Device,
    worker_context: WorkerContext,
    control: JobControl,
    start_seconds: float = 0.0,
) -> Generator[Event, None, None]:
    """Yield the events of the runner, then exactly one `Ended`.

    The job ends as stopped if its runner noticed the request to stop, else as finished. `SystemExit` is a failure of
    the job like any exception. KeyboardInterrupt is passed on to the caller. `start_seconds` is what the job has waited
    for this process.
    """
    clock = ActivityClock(_USUAL[job.purpose])
    clock.seconds[Activity.START] = start_seconds
    try:
        yield from _timed(runner(job, device, worker_context, control), clock)
    except (Exception, SystemExit) as error:
        outcome, message = record_failure(error, log_path(worker_context.directory, job.id))
    else:
        outcome, message = Outcome.STOPPED if control.stop_noticed else Outcome.FINISHED, ""
    yield Ended(job.id, outcome, message, clock.seconds)


def _timed(events: Iterator[Event], clock: ActivityClock) -> Iterator[Event]:
    """The events of a job, whose clock runs until each is there, and stands while the caller has it."""
    try:
        while True:
            with clock.running():
                event = next(events, None)
            if event is None:
                return
            yield event
    finally:
        if isinstance(events, Generator):
            events.close()
