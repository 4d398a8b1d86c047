"""A program that runs, with everything that belongs to it; and the frozen programs that this process keeps."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shoal.core.device import Device
from shoal.worker.opaque.channel import ProgramChannel
from shoal.worker.opaque.cuda_checkpoint import cuda_processes, freeze, thaw
from shoal.worker.opaque.program_files import ProgramFiles
from shoal.worker.opaque.program_process import ProgramProcess
from shoal.worker.opaque.program_reports import ProgramReports
from shoal.worker.opaque.usage_monitor import UsageMonitor

__all__ = ["ProgramSession", "keep", "take_kept"]

_HOST_MARGIN = 0.1
"""Fraction of host memory that stays free when a program is frozen."""


@dataclass
class ProgramSession:
    """A running program.

    Args:
        child: Its process.
        channel: Its connection for reports.
        monitor: Monitor of its usage.
        files: Files of its trial.
        reports: All reports of its trial.
        device: Its device.
        log: File of its standard error: the log of the job that started it.
        log_began: Position in this file at its start.
        last_report: Time of its last report or start, of `time.monotonic`.
        awaits_answers: Whether it waits for answers to its reports.
    """

    child: ProgramProcess
    channel: ProgramChannel
    monitor: UsageMonitor
    files: ProgramFiles
    reports: ProgramReports
    device: Device
    log: Path
    log_began: int
    last_report: float
    awaits_answers: bool
    _frozen: tuple[Sequence[psutil.Process], Sequence[psutil.Process]] | None = field(default=None, init=False)
    _frozen_at: float = field(default=0.0, init=False)
    _guard: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def freeze(self) -> bool | None:
        """Move the GPU state of the program to host memory and stop its processes, by `cuda-checkpoint`.

        Returns:
            True: done. False: it failed half-way, so the program must be closed. None: nothing was changed, since the
            program uses no GPU, `cuda-checkpoint` is not installed or does not know it, or the host has too little
            free memory.
        """
        tree = self.child.tree()
        holders = cuda_processes(tree) if self.device.is_cuda else []
        if not holders or not self._fits_host():
            return None
        self._frozen_at = time.monotonic()
        self._guard = _guard(tree)
        self._frozen = holders, tree
        return freeze(holders, tree)

    def _fits_host(self) -> bool:
        """Whether free host memory exceeds the program's memory on its GPU, or if that is unknown the whole GPU's, by
        `_HOST_MARGIN` of all host memory.
        """
        host = psutil.virtual_memory()
        needed = self.monitor.memory_used or self.device.memory
        return bool(host.available > needed + _HOST_MARGIN * host.total)

    def thaw(self) -> bool:
        """Continue a frozen program; return whether that worked. If not, the program must be closed."""
        assert self._frozen is not None
        assert self._guard is not None
        done = self.child.status() is None and thaw(*self._frozen)
        self._guard.kill()
        self._guard.communicate()
        self.last_report += time.monotonic() - self._frozen_at
        return done

    def close(self) -> None:
        """Kill the program, and free everything that belongs to it."""
        self.child.kill_all()
        self.channel.close()
        self.monitor.close()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()


def _guard(processes: Sequence[psutil.Process]) -> "subprocess.Popen[bytes]":
    """Start a process that kills these processes when this one ends, since stopped processes notice nothing.

    It kills only processes that are stopped, since other ids may belong to other processes by then.
    """
    pids = " ".join(str(process.pid) for process in processes)
    kill_stopped = f"for pid in {pids}; do grep -qs '^State:.T' /proc/$pid/status && kill -9 $pid; done"
    return subprocess.Popen(
        ["/bin/sh", "-c", f"cat; {kill_stopped}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


_kept: dict[tuple[Path, int], ProgramSession] = {}
"""Frozen programs, by directory of the study and number of the trial."""


def keep(directory: Path, trial: int, session: ProgramSession) -> None:
    """Keep a frozen program for the next job of its trial in this process.

    A trial that another process trains meanwhile has its frozen program killed by `ProgramFiles.prepare`.
    """
    _kept[directory, trial] = session


def take_kept(directory: Path, trial: int, device: Device) -> ProgramSession | None:
    """Return the program of a trial that this process has kept, running again; None if there is none that can go on.

    A program that cannot go on, or that is on another device, is killed.
    """
    session = _kept.pop((directory, trial), None)
    if session is None:
        return None
    if session.device.name == device.name and session.thaw():
        return session
    session.close()
    return None
