"""NVIDIA's `cuda-checkpoint`: moves the GPU state of running processes to host memory and back.

Between the two calls the processes are stopped (SIGSTOP), and hold no memory and no compute of the GPU.
"""

import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

import psutil

__all__ = ["cuda_processes", "freeze", "thaw"]

_PROGRAM = "cuda-checkpoint"

_STATE_SECONDS = 10.0
"""Longest wait for the state of a process."""

_TOGGLE_SECONDS = 120.0
"""Longest wait until the state of a process is moved."""


def cuda_processes(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that `cuda-checkpoint` can suspend; none where it is not installed or does not know them."""
    if shutil.which(_PROGRAM) is None:
        return []
    return [process for process in processes if _call("--get-state", process.pid, _STATE_SECONDS) == "running"]


def freeze(holders: Sequence[psutil.Process], processes: Sequence[psutil.Process]) -> bool:
    """Move the GPU state of processes to host memory, and stop the whole program.

    Args:
        holders: Result of `cuda_processes`.
        processes: All processes of the program.

    Returns:
        Whether that worked. If not, some processes may be without their GPU state: the program must be killed.
    """
    if not all(_toggled(process, "checkpointed") for process in holders):
        return False
    return _signal(processes, signal.SIGSTOP)


def thaw(holders: Sequence[psutil.Process], processes: Sequence[psutil.Process]) -> bool:
    """Undo `freeze` on the same GPU; arguments and result are those of `freeze`."""
    return _signal(processes, signal.SIGCONT) and all(_toggled(process, "running") for process in holders)


def _toggled(process: psutil.Process, state: str) -> bool:
    """Switch a process between running and checkpointed; return whether it is in the state afterwards."""
    moved = _call("--toggle", process.pid, _TOGGLE_SECONDS) is not None
    return moved and _call("--get-state", process.pid, _STATE_SECONDS) == state


def _call(action: str, pid: int, seconds: float) -> str | None:
    """Return the output of `cuda-checkpoint` for a process; None if it fails or takes too long."""
    try:
        done = subprocess.run(
            [_PROGRAM, action, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> bool:
    """Send a signal to the processes that have not ended; return whether any is left."""
    left = False
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            left = True
    return left
