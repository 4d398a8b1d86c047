"""Processes of this machine: what they run, whose they are, and their ends."""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress

import psutil

__all__ = ["created", "descends", "end", "family", "is_visible", "kill", "program"]

_LOOK_SECONDS = 0.01


def program(pid: int) -> str:
    """The name of the program; "pid 1234" where the process has ended or cannot be seen, as from within a container."""
    try:
        return psutil.Process(pid).name() or f"pid {pid}"
    except psutil.Error:
        return f"pid {pid}"


def is_visible(pid: int) -> bool:
    """Whether there is such a process as seen from here."""
    return psutil.pid_exists(pid)


def descends(pid: int, own: Collection[int]) -> bool:
    """Whether a process is one of these, or a child of one, or a child's child."""
    if pid in own:
        return True
    try:
        return any(parent.pid in own for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it has ended, or cannot be seen
        return False


def family(pid: int) -> list[psutil.Process]:
    """A process, those that it has started, and those that they have; none if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def created(pid: int) -> float:
    """When a process began, in seconds since 1970: its number may be another's later, this tells them apart.

    It is 0 where there is no such process.
    """
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def end(pid: int, began: float, seconds: float) -> None:
    """Kill a process that need not be a child of this one, and all that it started; wait until they do nothing more.

    Args:
        pid: its number.
        began: as `created` told it; another process that has its number by now is left alone.
        seconds: longest wait.
    """
    tree = family(pid) if created(pid) == began else []
    kill(tree)
    deadline = time.monotonic() + seconds
    while any(map(_works, tree)) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _works(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie that nobody collects."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
