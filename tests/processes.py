"""Whether processes that are about to end have ended."""

import time

import psutil


def alive(pid: float) -> bool:
    """Return whether a process runs; it may end during the call. One that its parent has not waited for does not run.

    Its number may be a float, as a metric holds it.
    """
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: float, seconds: float = 10.0) -> bool:
    """Return whether a process ends within some seconds."""
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
