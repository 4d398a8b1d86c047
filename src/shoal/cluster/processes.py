"""Processes of this machine: what they run, whose they are, and their ends."""

from collections.abc import Collection, Iterable
from contextlib import suppress

import psutil

__all__ = ["descends", "family", "is_visible", "kill", "program"]


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
