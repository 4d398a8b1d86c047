"""One job from its first event to its `Ended`, in whatever process it runs."""

import importlib
import traceback
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

from shoal.backend.base import Ended, Event, Outcome, Runner, Workplace
from shoal.backend.outcome import failed
from shoal.cluster.device import Device
from shoal.errors import BackendError
from shoal.planner.job import Job
from shoal.planner.orders import Orders

__all__ = ["log_path", "perform", "resolve"]


def resolve(path: str) -> Runner:
    """Import the runner that "module:function" names.

    Raises:
        BackendError: the path has another form, or names nothing that can be called.
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


def log_path(workplace: Workplace, job: str) -> Path:
    """The file with a job's output and, if it failed, its full traceback."""
    return workplace.directory / "logs" / f"{job}.log"


def perform(
    runner: Runner, job: Job, device: Device, workplace: Workplace, orders: Orders
) -> Generator[Event, None, None]:
    """What the runner yields, then exactly one `Ended`.

    A job whose runner saw that it is to stop ends as stopped, one that returned before it looked has finished.
    `SystemExit` is a failure of the job like any exception; KeyboardInterrupt goes through to whoever is at the
    keyboard.
    """
    try:
        yield from runner(job, device, workplace, orders)
    except (Exception, SystemExit) as error:
        log = log_path(workplace, job.id)
        _record(error, log)
        ended = failed(job.id, error, log)
    else:
        ended = Ended(job.id, Outcome.STOPPED if orders.noticed else Outcome.FINISHED)
    yield ended


def _record(error: BaseException, log: Path) -> None:
    # A disk without room for the log must not hide why the job failed.
    with suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))
