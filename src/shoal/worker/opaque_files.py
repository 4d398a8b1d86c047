"""What a program of the user's keeps of a trial: the directory it works in, and what of that was put aside.

`checkpoints/<trial>/live` is the program's. At a report a copy of it becomes `checkpoints/<trial>/<step>-000000-files`,
by a rename, so it is there wholly or not at all. The two newest are kept.
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

from shoal.cluster.processes import created, end
from shoal.trial import Report
from shoal.worker.files import folder, published

__all__ = ["Store"]

_KEPT = 2
_TICK_SECONDS = 0.02
"""More than between two times of change that a file system tells apart."""

_DEATH_SECONDS = 2.0
"""For a process that was killed."""

_Mark = tuple[int, int, int, int]
"""By what it is known whether a file has changed: its inode, size, and the times of its last changes."""


@dataclass
class _Newest:
    """What was put aside last.

    Args:
        path: where.
        marks: of the files in `live` that it holds copies of, by their paths in it.
    """

    path: Path | None
    marks: dict[str, _Mark]


class Store:
    """The files of one trial.

    Args:
        directory: of the study.
        trial: its number.
    """

    def __init__(self, directory: Path, trial: int) -> None:
        self._directory = directory
        self._trial = trial
        self._folder = folder(directory, trial)
        self.live = self._folder / "live"
        """The directory that the program works in."""
        self.went_on = False
        """Whether the program goes on with what it left there itself."""
        self.reports: list[Report] = []
        """Those behind what was put aside last."""
        self._newest = _Newest(None, {})

    @property
    def step(self) -> int:
        """How many reports the contents of `live` have behind them, as far as that is known."""
        return self.reports[-1].epoch if self.reports else 0

    def begin(self) -> None:
        """Let `live` be what was put aside last.

        Where nothing ever was it is empty; but a program whose reports are read from its output goes on with what it
        left there.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._end_process()
        for leftover in (*self._folder.glob("*.partial"), *self._folder.glob("*.stale")):
            shutil.rmtree(leftover, ignore_errors=True)
        path = next(iter(published(self._directory, self._trial)), None)
        if path is None and self._keeps_itself.exists():
            self.went_on = True
            return
        shutil.rmtree(self.live, ignore_errors=True)
        if path is None:
            self.live.mkdir()
            return
        shutil.copytree(path / "files", self.live, symlinks=True)
        rows = json.loads((path / "reports.json").read_text(encoding="utf-8"))
        self.reports = [Report(self._trial, epoch, metrics, seconds) for epoch, metrics, seconds in rows]
        self._newest = _Newest(path, self._marks())

    def keeps_itself(self) -> None:
        """The program does not wait at its reports, so what it keeps is for itself to keep whole."""
        self._keeps_itself.touch()

    def put_aside(self, reports: Sequence[Report]) -> None:
        """Keep a copy of `live`, if anything in it has changed. Nobody may write there meanwhile.

        Files that have not changed are not copied again but linked to their copies, which nobody writes.

        Args:
            reports: all that the trial has made, the last one now.

        Raises:
            OSError: the disk is full or cannot be written; what was put aside before is intact.
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
            rows = [(report.epoch, dict(report.metrics), report.seconds) for report in reports]
            (partial_ / "reports.json").write_text(json.dumps(rows), encoding="utf-8")
        except shutil.Error as error:  # it hides what the file system said
            shutil.rmtree(partial_, ignore_errors=True)
            raise OSError(f"{self.live} could not be copied: {error}") from error
        except OSError:
            shutil.rmtree(partial_, ignore_errors=True)
            raise
        if path.exists():  # the program went back behind it
            stale = path.with_suffix(".stale")
            path.replace(stale)
            shutil.rmtree(stale)
        partial_.replace(path)
        self.reports = list(reports)
        self._newest = _Newest(path, marks)
        self._drop_others(path)
        self._let_time_pass(marks)

    def note_process(self, pid: int) -> None:
        """The program's process: who begins after this one was killed ends it first."""
        note = {"pid": pid, "created": created(pid)}
        self._process.write_text(json.dumps(note), encoding="utf-8")

    def _end_process(self) -> None:
        """Two of them must not write at once."""
        if not self._process.exists():
            return
        text = self._process.read_text(encoding="utf-8")
        self._process.unlink()
        try:
            note: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError:  # it was never finished
            return
        end(note["pid"], note["created"], _DEATH_SECONDS)

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
            except OSError:  # of a file system without links
                shutil.copy2(source, target)
        else:
            shutil.copy2(source, target)
        return target

    def _drop_others(self, path: Path) -> None:
        others = [other for other in published(self._directory, self._trial) if other != path]
        older = [other for other in others if other.name < path.name]
        for other in others:  # from one beyond it training did not go on
            if other not in older[: _KEPT - 1]:
                stale = other.with_suffix(".stale")
                other.replace(stale)
                shutil.rmtree(stale)

    def _let_time_pass(self, marks: dict[str, _Mark]) -> None:
        """So that whatever is written from now on has another time of change."""
        last = max(mark[3] for mark in marks.values()) / 1e9
        left = last + _TICK_SECONDS - time.time()
        if left > 0:
            time.sleep(min(left, _TICK_SECONDS))

    @property
    def _keeps_itself(self) -> Path:
        return self._folder / "keeps-itself"

    @property
    def _process(self) -> Path:
        return self._folder / "process.json"
