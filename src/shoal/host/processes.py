"""Processes of this machine: names, descent, start times, open drivers, and kills of process trees."""

import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import psutil

from shoal.host.file_system import kernel_lines

__all__ = [
    "catches",
    "driver_files",
    "is_alive",
    "is_descendant",
    "is_visible",
    "kill",
    "kill_tree",
    "note_inherited_memory",
    "offer_to_oom_killer",
    "open_standard_streams",
    "own_memory",
    "process_tree",
    "program_name",
    "start_time",
    "wait_for_exit",
]

_POLL_SECONDS = 0.01
"""Time between two checks of running processes."""

_DRIVERS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""Files that a driver of GPUs opens; its context does not survive a fork."""

_inherited_bytes = 0


def note_inherited_memory() -> None:
    """Note in a forked process that its memory so far is shared with the process that forked it."""
    global _inherited_bytes
    _inherited_bytes = psutil.Process().memory_info().rss


def offer_to_oom_killer() -> None:
    """Raise the score by which the kernel of Linux chooses what it kills when memory runs out, also of children.

    So it kills a worker or its program before the engine, which would end the study.
    """
    # There is no such file but on Linux, and in some containers it may not be written.
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        score = min(1000, int(file.read()) + 500)
        file.seek(0)
        file.write(str(score))


def own_memory() -> int:
    """Return the resident bytes of this process, without those that it shares with the process that forked it."""
    return max(0, int(psutil.Process().memory_info().rss) - _inherited_bytes)


def driver_files() -> list[str]:
    """Return the files of GPU drivers that this process has opened; only on Linux."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself is closed by now
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [file for file in found if file.startswith(_DRIVERS)]


def open_standard_streams() -> None:
    """Open the null device for each standard stream of this process that is closed.

    Else the next files would get their numbers, and with these the output of libraries and of child processes.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def program_name(pid: int) -> str:
    """Return the name of the program; "pid 1234" if the process has ended or is not visible, as in a container."""
    try:
        return psutil.Process(pid).name() or f"pid {pid}"
    except psutil.Error:
        return f"pid {pid}"


def is_visible(pid: int) -> bool:
    """Return whether a process exists and is visible."""
    return psutil.pid_exists(pid)


def is_descendant(pid: int, own: Collection[int]) -> bool:
    """Return whether a process is one of these, or a descendant of one."""
    if pid in own:
        return True
    try:
        return any(parent.pid in own for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it has ended, or is not visible
        return False


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; False if it has ended, or where there is no /proc."""
    try:
        lines = kernel_lines(f"/proc/{pid}/status")
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes that are still running."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def start_time(pid: int) -> float:
    """Return the start time of a process in seconds since 1970, as its id may be used again; 0 if it does not exist."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def kill_tree(pid: int, started: float, seconds: float) -> None:
    """Kill a process and its descendants, and wait; one that began after `started`, with the same id, is left alone."""
    tree = process_tree(pid) if start_time(pid) == started else []
    kill(tree)
    wait_for_exit(tree, seconds)


def wait_for_exit(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for the ends of processes; return those that still run. A zombie counts as ended: it may never be reaped."""
    deadline = time.monotonic() + seconds
    while (running := [x for x in processes if x.is_running() and is_alive(x.pid)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return running


def is_alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
