"""Files of a trial that a program trains: its working directory, and checkpoints of that.

The program works in `checkpoints/<trial>/live`. If it waits for answers to its reports, each report makes a checkpoint
`checkpoints/<trial>/<step>-000000-files`: a copy of `live`, renamed once it is complete. The two newest are kept. A
program that prints its reports must keep `live` consistent itself. Its output is in `output-<step>`, named by the last
report before its start. The reports of its earlier starts are in `reports.json`.
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.cluster.processes import kill_tree, start_time
from shoal.core.trial import Report
from shoal.worker.files import folder, published
from shoal.worker.opaque.channel import OutputReports
from shoal.worker.opaque.reports import ProgramReports

__all__ = ["ProgramFiles"]

_KEPT = 2
_TICK_SECONDS = 0.02
"""More than the resolution of file times."""

_DEATH_SECONDS = 2.0
"""Most seconds to wait until a killed process has ended."""

_Mark = tuple[int, int, int, int]
"""Inode, size, mtime and ctime of a file, which show whether it has changed."""


@dataclass
class _Newest:
    """The newest checkpoint.

    Args:
        path: Directory of the checkpoint; None if there is none.
        marks: Path in `live` -> mark of the file when it was copied.
    """

    path: Path | None
    marks: dict[str, _Mark]


class ProgramFiles:
    """The files of one trial.

    Args:
        directory: Directory of the study.
        trial: Number of the trial.
    """

    def __init__(self, directory: Path, trial: int) -> None:
        self._directory = directory
        self._trial = trial
        self._folder = folder(directory, trial)
        self.live = self._folder / "live"
        """Working directory of the program."""
        self.went_on = False
        """Whether the program goes on from files that it left in `live`."""
        self.reports: list[Report] = []
        """Reports up to the newest checkpoint, or all that the program has printed."""
        self._newest = _Newest(None, {})

    @property
    def step(self) -> int:
        """Number of the report after which `live` was made, as far as that is known; else 0."""
        behind = self.reports and (self.went_on or self._newest.path is not None)
        return self.reports[-1].epoch if behind else 0

    @property
    def output(self) -> Path:
        """File for the output of the next start."""
        return self._folder / f"output-{self.step:06d}"

    @property
    def ended(self) -> bool:
        """Whether the program has ended by itself, before its budget was used."""
        return self._ended.exists()

    def begin(self, metrics: Sequence[str] = ()) -> None:
        """Prepare `live` for a start: restore the newest checkpoint, or empty it if there is none.

        If there is no checkpoint, a program that prints its reports goes on from the files that it left in `live`.

        Args:
            metrics: Metrics that a line of a command's output must have to be a report.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._end_process()
        for leftover in (*self._folder.glob("*.partial"), *self._folder.glob("*.stale")):
            shutil.rmtree(leftover, ignore_errors=True)
        path = next(iter(published(self._directory, self._trial)), None)
        if path is None and metrics and (self.gather(metrics) or self._keeps_itself.exists()):
            self.live.mkdir(exist_ok=True)
            self.went_on = any(self.live.iterdir())
            return
        for printed in self._outputs():
            printed.unlink()
        shutil.rmtree(self.live, ignore_errors=True)
        if path is None:
            self.live.mkdir()
            return
        shutil.copytree(path / "files", self.live, symlinks=True)
        self.reports = self._read(path / "reports.json")
        self._newest = _Newest(path, self._marks())

    def gather(self, metrics: Sequence[str]) -> list[Report]:
        """Move reports from the outputs of ended programs to `reports.json`; returns all reports.

        A kill at any moment loses none, since gathering an output twice has no effect.
        """
        self.reports = self._read(self._reports) if self._reports.exists() else []
        outputs = self._outputs()
        for path in outputs:
            record = ProgramReports(self._trial, self.reports, int(path.name.rpartition("-")[2]), metrics)
            printed = OutputReports(path, metrics)
            for said in printed.rest():
                if record.fault(said) or record.skips(said):
                    break
                record.add(said, 0.0)
            printed.close()
            self.reports = record.reports
        if outputs and self.reports:
            partial_ = self._reports.with_suffix(".partial")
            self._write(partial_, self.reports)
            partial_.replace(self._reports)
        for path in outputs:
            path.unlink()
        return self.reports

    def start_over(self) -> None:
        """Delete the program's own state, which is ahead of its reports, so that it begins again."""
        for path in (*self._outputs(), self._reports, self._ended, self._keeps_itself):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.live, ignore_errors=True)
        self.live.mkdir()
        self.reports, self.went_on = [], False

    def note_end(self) -> None:
        """Record that the program has ended by itself, after a report."""
        self._ended.touch()

    def put_aside(self, reports: Sequence[Report]) -> None:
        """Make a checkpoint of `live`, if anything in it has changed. Nobody may write there meanwhile.

        Unchanged files are hard links to their copies in the last checkpoint.

        Args:
            reports: All reports of the trial, the last one just made.

        Raises:
            OSError: The disk is full or cannot be written; earlier checkpoints are intact.
        """
        marks = self._marks()
        if not marks or (marks == self._newest.marks and self._newest.path is not None):
            return
        path = self._folder / f"{reports[-1].epoch:06d}-000000-files"
        partial_ = path.with_suffix(".partial")
        shutil.rmtree(partial_, ignore_errors=True)
        try:
            copy = partial(self._copy, marks)
            shutil.copytree(self.live, partial_ / "files", symlinks=True, copy_function=copy)
            self._write(partial_ / "reports.json", reports)
        except shutil.Error as error:  # it hides the error of the file system
            shutil.rmtree(partial_, ignore_errors=True)
            raise OSError(f"{self.live} could not be copied: {error}") from error
        except OSError:
            shutil.rmtree(partial_, ignore_errors=True)
            raise
        if path.exists():  # the program went back to an earlier report
            stale = path.with_suffix(".stale")
            path.replace(stale)
            shutil.rmtree(stale)
        partial_.replace(path)
        self.reports = list(reports)
        self._newest = _Newest(path, marks)
        self._drop_others(path)
        self._let_time_pass(marks)

    def note_process(self, pid: int) -> None:
        """Record the program's process. If the worker is killed, the next `begin` ends that process."""
        note = {"pid": pid, "created": start_time(pid)}
        self._process.write_text(json.dumps(note), encoding="utf-8")

    def _end_process(self) -> None:
        """End the process of an earlier start: two must not write at once."""
        if not self._process.exists():
            return
        text = self._process.read_text(encoding="utf-8")
        self._process.unlink()
        try:
            note: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError:  # the file is incomplete
            return
        kill_tree(note["pid"], note["created"], _DEATH_SECONDS)

    def _marks(self) -> dict[str, _Mark]:
        marks = {}
        for place, _, names in os.walk(self.live):
            for name in names:
                path = os.path.join(place, name)
                info = os.lstat(path)
                marks[os.path.relpath(path, self.live)] = (
                    info.st_ino,
                    info.st_size,
                    info.st_mtime_ns,
                    info.st_ctime_ns,
                )
        return marks

    def _copy(self, marks: dict[str, _Mark], source: str, target: str) -> str:
        name = os.path.relpath(source, self.live)
        if self._newest.path is not None and self._newest.marks.get(name) == marks.get(name):
            try:
                os.link(self._newest.path / "files" / name, target)
            except OSError:  # a file system without links
                shutil.copy2(source, target)
        else:
            shutil.copy2(source, target)
        return target

    def _drop_others(self, path: Path) -> None:
        others = [other for other in published(self._directory, self._trial) if other != path]
        older = [other for other in others if other.name < path.name]
        for other in others:  # no training went on from a later one
            if other not in older[: _KEPT - 1]:
                stale = other.with_suffix(".stale")
                other.replace(stale)
                shutil.rmtree(stale)

    def _let_time_pass(self, marks: dict[str, _Mark]) -> None:
        """Wait until file times differ from those in `marks`, so that later changes show."""
        last = max(mark[3] for mark in marks.values()) / 1e9
        left = last + _TICK_SECONDS - time.time()
        if left > 0:
            time.sleep(min(left, _TICK_SECONDS))

    def _outputs(self) -> list[Path]:
        return sorted(self._folder.glob("output-*"))

    def _read(self, path: Path) -> list[Report]:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [Report(self._trial, epoch, metrics, seconds) for epoch, metrics, seconds in rows]

    def _write(self, path: Path, reports: Sequence[Report]) -> None:
        rows = [(report.epoch, dict(report.metrics), report.seconds) for report in reports]
        path.write_text(json.dumps(rows), encoding="utf-8")

    @property
    def _reports(self) -> Path:
        return self._folder / "reports.json"

    @property
    def _keeps_itself(self) -> Path:
        """Marks a program that prints its reports, in studies from before `reports.json`."""
        return self._folder / "keeps-itself"

    @property
    def _ended(self) -> Path:
        return self._folder / "ended"

    @property
    def _process(self) -> Path:
        return self._folder / "process.json"
