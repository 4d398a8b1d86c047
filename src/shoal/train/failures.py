"""Converts an exception into the outcome of a job or array and a message for the user."""

import errno
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal.core.errors import MetricNameError, StorageFullError, TaskError, UnusableTaskError
from shoal.core.event import Outcome
from shoal.host.tracebacks import user_traceback

__all__ = ["ProgramFailedError", "describe", "outcome_of", "record_failure"]

_REJECTIONS = (Outcome.REJECTED, Outcome.UNUSABLE)
_MEMORY_MESSAGES = (
    "can't allocate memory",  # c10's CPU allocator on Linux
    "std::bad_alloc",  # C++, in the last output of a program
    "DefaultCPUAllocator: not enough memory",  # and on Windows and macOS
    "CUDA error: out of memory",  # raised by the driver, past torch's caching allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_STORAGE_MESSAGES = (
    "PytorchStreamWriter failed writing file",  # torch.save: the first write beyond the free space
    "unexpected pos",  # torch.save: closing an incomplete archive
    "iostream error",  # torch.save: an archive that fits the stream's buffer but not the disk
    "database or disk is full",  # SQLite
    "No space left on device",
    "Disk quota exceeded",
)


class ProgramFailedError(Exception):
    """A program of the user failed in its own process."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a job that raised an exception: the outcome of the outermost known explicit cause."""
    for link in _causes(error):
        if isinstance(link, ProgramFailedError):
            return link.outcome
        if isinstance(link, MetricNameError):  # a failure of one trial, as for a metric of a Task with such a name
            return Outcome.RAISED
        if isinstance(link, TaskError):
            return Outcome.UNUSABLE if isinstance(link, UnusableTaskError) else Outcome.REJECTED
        if _is_out_of_memory(link):
            return Outcome.OUT_OF_MEMORY
        if _is_storage_full(link):
            return Outcome.STORAGE_FULL
    return Outcome.RAISED


def record_failure(error: BaseException, log: Path) -> tuple[Outcome, str]:
    """Append the traceback of an exception to a log; return its outcome, and a message with the path of the log."""
    # A full disk must not hide why the job failed.
    with suppress(OSError):
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(traceback.format_exception(error))
    outcome, text = describe(error)
    return outcome, f"{text.rstrip()}\nLog: {log}"


def describe(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of an exception and a message for the user."""
    outcome = outcome_of(error)
    if isinstance(error, ProgramFailedError):
        text = str(error)
    elif outcome is Outcome.RAISED:
        text = user_traceback(error)
    elif outcome in _REJECTIONS and error.__cause__ is not None:
        text = f"{error}\n\n{user_traceback(error.__cause__)}"
    elif outcome in _REJECTIONS:
        text = str(error)
    else:
        text = "".join(traceback.format_exception_only(error))
    return outcome, text


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    # Compared by name, since torch may not be installed.
    if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_MESSAGES)


def _is_storage_full(error: BaseException) -> bool:
    if isinstance(error, StorageFullError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return isinstance(error, Exception) and any(text in str(error) for text in _STORAGE_MESSAGES)
