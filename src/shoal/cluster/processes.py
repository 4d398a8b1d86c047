"""Processes of this machine: names, descent, start times, and kills of process trees."""

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import psutil

__all__ = ["created", "descends", "end", "family", "is_alive", "is_visible", "kill", "program", "remaining"]

_LOOK_SECONDS = 0.01
"""Time between two checks of running processes."""


def program(pid: int) -> str:
    """Return the name of the program; "pid 1234" if the process has ended or is not visible, as in a container."""
    try:
        return psutil.Process(pid).name() or f"pid {pid}"
    except psutil.Error:
        return f"pid {pid}"


def is_visible(pid: int) -> bool:
    """Whether a process exists and is visible."""
    return psutil.pid_exists(pid)


def descends(pid: int, own: Collection[int]) -> bool:
    """Whether a process is one of these, or a descendant of one."""
    if pid in own:
        return True
    try:
        return any(parent.pid in own for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it has ended, or is not visible
        return False


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes that are still running."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def created(pid: int) -> float:
    """Return the start time of a process in seconds since 1970, as its id may be used again; 0 if it does not exist."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def end(pid: int, began: float, seconds: float) -> None:
    """Kill a process, which need not be a child, and its descendants; wait for their ends.

    Args:
        pid: Id of the process.
        began: Start time, as of `created`; a later process with the same id is not killed.
        seconds: Longest wait.
    """
    tree = family(pid) if created(pid) == began else []
    kill(tree)
    remaining(tree, seconds)


def remaining(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait up to some seconds for the ends of processes; return those that still run.

    A zombie counts as ended, as in a container it may never be reaped.
    """
    deadline = time.monotonic() + seconds
    while (running := [x for x in processes if x.is_running() and is_alive(x.pid)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return running


def is_alive(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
