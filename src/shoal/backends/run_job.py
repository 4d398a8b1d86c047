"""Runs one job from its first event to its `Ended`, in any process."""

import importlib
from collections.abc import Generator

from shoal.backends.base import Ended, Event, Outcome, Runner, WorkerContext
from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.core.job import Job, log_path
from shoal.worker.control import JobControl
from shoal.worker.failures import recorded

__all__ = ["resolve", "run_job"]


def resolve(path: str) -> Runner:
    """Import the runner that "module:function" names.

    Raises:
        BackendError: The path has another form, or names nothing that can be called.
    """
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
    runner: Runner, job: Job, device: Device, worker_context: WorkerContext, control: JobControl
) -> Generator[Event, None, None]:
    """Yield the events of the runner, then exactly one `Ended`.

    The job ends as stopped if its runner noticed the request to stop, else as finished. `SystemExit` is a failure of
    the job like any exception. KeyboardInterrupt is passed on to the caller.
    """
    try:
        yield from runner(job, device, worker_context, control)
    except (Exception, SystemExit) as error:
        ended = Ended(job.id, *recorded(error, log_path(worker_context.directory, job.id)))
    else:
        ended = Ended(job.id, Outcome.STOPPED if control.noticed else Outcome.FINISHED)
    yield ended
