"""Whether processes that are about to end have ended."""

import os
import select
import time
from collections.abc import Callable

import psutil


def alive(pid: float) -> bool:
    """Return whether a process runs; it may end during the call. One that its parent has not waited for does not run.

    Its number may be a float, as a metric holds it.
    """
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: float, seconds: float = 60.0) -> bool:
    """Return whether a process ends within some seconds."""
    try:
        ended = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([ended], [], [], seconds)[0])
    finally:
        os.close(ended)


def reaped(pid: int) -> bool:
    """Return whether a process ends and its parent waits for it; one with threads may hold its files until then."""
    wait_for(lambda: not psutil.pid_exists(pid))
    return True


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds that no file descriptor tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)
