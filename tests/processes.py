"""Whether processes that are about to end have ended."""

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


def gone(pid: float) -> bool:
    """Return whether a process ends."""
    wait_for(lambda: not alive(pid))
    return True


def reaped(pid: int) -> bool:
    """Return whether a process ends and its parent waits for it; one with threads may hold its files until then."""
    wait_for(lambda: not psutil.pid_exists(pid))
    return True


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds, which fails only where it never would."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)
