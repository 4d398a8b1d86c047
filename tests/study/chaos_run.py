"""A study whose engine is a process that may be killed, what is known of it from outside, and what came of it."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shoal.core.errors import JournalError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView

ENGINE = Path(__file__).with_name("chaos_engine.py")


@dataclass(frozen=True)
class TrainingJob:
    """A training job that runs now.

    Args:
        device: its name.
        trials: numbers of those that it trains.
        started: in seconds since 1970.
    """

    device: str
    trials: frozenset[int]
    started: float


class Run:
    """An engine's process and the processes below it.

    Args:
        directory: of the study.
        place: what is searched and where, as `chaos_engine.py` has it.
        trials: how many.
    """

    def __init__(self, directory: Path, place: str, trials: int) -> None:
        self.directory = directory
        self._command = [sys.executable, ENGINE, directory, place, str(trials)]
        self._log = directory.with_suffix(".log")
        self.begin()

    def begin(self) -> None:
        """Start the engine, or another one after it has been killed."""
        self._began = time.time()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def ended(self) -> bool:
        """Whether the study has."""
        status = self.process.poll()
        assert status in (None, 0), f"the engine exited with status {status}:\n{self._log.read_text()[-3000:]}"
        return status == 0

    def jobs(self) -> dict[str, TrainingJob]:
        """The training jobs that run now, by id."""
        with suppress(JournalError), JournalView.read(self.directory) as journal:
            rows = [row for row in journal.trials() if row.state is TrialState.RUNNING]
            return {
                job.id: TrainingJob(job.device, frozenset(row.number for row in rows if row.job == job.id), job.started)
                for job in journal.jobs(running=True)
                if job.purpose is Purpose.TRAIN and job.started > self._began  # else a killed engine has left it so
            }
        return {}

    def workers(self) -> dict[str, psutil.Process]:
        """Id of each training job that has a process now -> that, which writes to the log of the job."""
        jobs: dict[str, Any] = self.jobs()
        found: dict[str, psutil.Process] = {}
        for each in psutil.process_iter():  # a worker comes before the programs that it starts
            with suppress(OSError):
                log = Path(os.readlink(f"/proc/{each.pid}/fd/1"))
                if log.parent == self.directory / "logs" and log.stem in jobs:
                    found.setdefault(log.stem, each)
        return found

    def reports(self) -> int:
        """Epochs that trials have reported."""
        with suppress(JournalError), JournalView.read(self.directory) as journal:
            return sum(row.epoch for row in journal.trials())
        return 0

    def unsaved_seconds(self) -> float:
        """Age of the newest checkpoint, the worst of all trials in training that were saved since their jobs began."""
        now, ages = time.time(), [0.0]
        for job in self.jobs().values():
            for number in job.trials:
                with suppress(FileNotFoundError):  # the older ones are dropped meanwhile
                    files = list((self.directory / "checkpoints" / f"{number:06d}").glob("*.pt"))
                    newest = max((file.stat().st_mtime for file in files), default=0.0)
                    ages += [now - newest] if newest > job.started else []
        return max(ages)

    def waiting(self) -> str:
        """What runs, and why the other trials wait."""
        with JournalView.read(self.directory) as journal:
            running = [f"{job.id} on {job.device} since {job.started}" for job in journal.jobs(running=True)]
            reasons = StudyStatistics(journal).waiting()
            return "\n".join([*running, *(f"{reason}: {numbers}" for reason, numbers in reasons.items())])


def standings(directory: Path) -> list[tuple[Any, ...]]:
    """What became of each trial, less its metrics."""
    with JournalView.read(directory) as journal:
        return [(row.number, dict(row.config), row.state, row.epoch, row.target) for row in journal.trials()]


def left_behind(place: Path, seconds: float) -> list[str]:
    """Processes that still have to do with a directory after some seconds in which they may end."""
    deadline = time.monotonic() + seconds
    while (found := [text for each in psutil.process_iter() if (text := _tie(each, place))]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return found


def _tie(process: psutil.Process, place: Path) -> str:
    """What a process has to do with a directory: it runs a program of there, or has a file of there open."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        words = process.cmdline()
        links = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
        if process.pid != os.getpid() and any(text.startswith(str(place)) for text in (*words, *links)):
            return f"{process.pid} {' '.join(words)[:100]}"
    return ""
