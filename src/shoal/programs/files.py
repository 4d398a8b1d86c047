"""Files of a trial that a program trains: its working directory, and checkpoints of this directory.

The program works in `checkpoints/<trial>/live`. If it waits for answers to its reports, each report creates a
checkpoint `checkpoints/<trial>/<step>-000000-files`: a copy of `live`, renamed once it is complete. The two newest
checkpoints are kept, and that of the best report. A program that prints its reports must itself keep `live`
consistent. Its output is in `output-<step>`, where the step is that of the last report before its start. The reports of
its earlier runs are in `reports.json`.
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

from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.trial import Report
from shoal.host.processes import kill_tree, start_time
from shoal.programs.reports import OutputReports, ProgramReports
from shoal.train.checkpoint_paths import checkpoint_directory, make_checkpoint_directory, program_checkpoints

__all__ = ["ProgramFiles"]

_MAX_CHECKPOINTS = 2
_FILE_TIME_SECONDS = 0.02
"""Seconds that exceed the resolution of file times."""

_KILL_TIMEOUT_SECONDS = 2.0
"""Maximum seconds to wait until a killed process has ended."""

_FileStamp = tuple[int, int, int, int]
"""Inode, size, mtime and ctime of a file, which change whenever the file changes."""


@dataclass
class _NewestCheckpoint:
    path: Path | None
    stamps: dict[str, _FileStamp]


class ProgramFiles:
    """Manages the files of one trial.

    Args:
        start: Number of the last report of the trial's origin; 0 without one.
        of_best: As in `WorkerContext`.
    """

    def __init__(self, directory: Path, trial: int, start: int = 0, of_best: EpochOrder = LAST_EPOCHS) -> None:
        self._start, self._of_best = start, of_best
        self._directory = directory
        self._trial = trial
        self._folder = checkpoint_directory(directory, trial)
        self.live = self._folder / "live"
        self.resumed = False
        """Whether the program continues from files that it left in `live`."""
        self.reports: list[Report] = []
        """Reports up to the newest checkpoint, or all reports that the program has printed."""
        self._newest = _NewestCheckpoint(None, {})

    @property
    def step(self) -> int:
        """Number of the last report before the state of `live`; 0 if it is unknown."""
        behind = self.reports and (self.resumed or self._newest.path is not None)
        return self.reports[-1].epoch if behind else 0

    @property
    def output(self) -> Path:
        """File for the output of the next run."""
        return self._folder / f"output-{self.step:06d}"

    @property
    def ended(self) -> bool:
        """Whether the program has ended by itself before its budget was used."""
        return self._ended.exists()

    def prepare(self, metrics: Sequence[str] = ()) -> None:
        """Prepare `live` for a run: restore the newest checkpoint, or clear the directory if there is none.

        A program that prints its reports, with these metrics, then continues from the files that it left in `live`.
        """
        make_checkpoint_directory(self._directory, self._trial)
        self._end_process()
        for leftover in (*self._folder.glob("*.partial"), *self._folder.glob("*.stale")):
            shutil.rmtree(leftover, ignore_errors=True)
        path = next(iter(program_checkpoints(self._directory, self._trial)), None)
        if path is None and metrics and self.collect_output(metrics):
            self.live.mkdir(exist_ok=True)
            self.resumed = any(self.live.iterdir())
            return
        for printed in self._outputs():
            printed.unlink()
        shutil.rmtree(self.live, ignore_errors=True)
        if path is None:
            self.live.mkdir()
            return
        shutil.copytree(path / "files", self.live, symlinks=True)
        self.reports = self._read(path / "reports.json")
        self._newest = _NewestCheckpoint(path, self._file_stamps())

    def collect_output(self, metrics: Sequence[str]) -> list[Report]:
        """Move the reports of ended programs to `reports.json`, and return all; twice has no further effect."""
        self.reports = self._read(self._reports) if self._reports.exists() else []
        outputs = self._outputs()
        for path in outputs:
            record = ProgramReports(self._trial, self.reports, int(path.name.rpartition("-")[2]), metrics)
            printed = OutputReports(path, metrics)
            for program_report in printed.read_rest():
                if record.find_error(program_report) or record.leaves_gap(program_report):
                    break
                record.add(program_report, 0.0)
            printed.close()
            self.reports = record.reports
        if outputs and self.reports:
            partial_ = self._reports.with_suffix(".partial")
            self._write(partial_, self.reports)
            partial_.replace(self._reports)
        for path in outputs:
            path.unlink()
        return self.reports

    def reset(self) -> None:
        """Delete the state of the program, which is ahead of its reports, so that the program starts over."""
        for path in (*self._outputs(), self._reports, self._ended, self._returning):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.live, ignore_errors=True)
        self.live.mkdir()
        self.reports, self.resumed = [], False

    def record_end(self) -> None:
        """Record that the program has ended by itself, after a report."""
        self._ended.touch()
        self.record_returning(over=True)

    @property
    def returning(self) -> bool:
        """Whether all of the budget is reported, but for the value that the program returns."""
        return self._returning.exists()

    def record_returning(self, *, over: bool = False) -> None:
        """Record that only the value that the program returns is to come, or (`over`) no more."""
        if over:
            self._returning.unlink(missing_ok=True)
        else:
            self._returning.touch()

    def save_checkpoint(self, reports: Sequence[Report]) -> None:
        """Write a checkpoint of `live` if anything has changed; unchanged files are hard links to the last.

        No process may write to it meanwhile. If it cannot be written, earlier checkpoints are intact.
        """
        stamps = self._file_stamps()
        if not stamps or (stamps == self._newest.stamps and self._newest.path is not None):
            return
        path = self._folder / f"{reports[-1].epoch:06d}-000000-files"
        partial_ = path.with_suffix(".partial")
        shutil.rmtree(partial_, ignore_errors=True)
        try:
            copy = partial(self._copy, stamps)
            shutil.copytree(self.live, partial_ / "files", symlinks=True, copy_function=copy)
            self._write(partial_ / "reports.json", reports)
        except shutil.Error as error:  # `shutil.Error` hides the error of the file system
            shutil.rmtree(partial_, ignore_errors=True)
            raise OSError(f"{self.live} could not be copied: {error}") from error
        except OSError:
            shutil.rmtree(partial_, ignore_errors=True)
            raise
        if path.exists():  # the program restarted from an earlier report
            stale = path.with_suffix(".stale")
            path.replace(stale)
            shutil.rmtree(stale)
        partial_.replace(path)
        self.reports = list(reports)
        self._newest = _NewestCheckpoint(path, stamps)
        self._delete_old_checkpoints(path)
        self._wait_for_new_file_time(stamps)

    def record_process(self, pid: int) -> None:
        """Record the process of the program. If the worker is killed, the next call of `prepare` ends this process."""
        note = {"pid": pid, "created": start_time(pid)}
        self._process.write_text(json.dumps(note), encoding="utf-8")

    def _end_process(self) -> None:
        """End the process of an earlier run, since two processes must not write at the same time."""
        if not self._process.exists():
            return
        text = self._process.read_text(encoding="utf-8")
        self._process.unlink()
        try:
            note: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError:  # the file is incomplete
            return
        kill_tree(note["pid"], note["created"], _KILL_TIMEOUT_SECONDS)

    def _file_stamps(self) -> dict[str, _FileStamp]:
        stamps = {}
        for place, _, names in os.walk(self.live):
            for name in names:
                path = os.path.join(place, name)
                info = os.lstat(path)
                stamps[os.path.relpath(path, self.live)] = (
                    info.st_ino,
                    info.st_size,
                    info.st_mtime_ns,
                    info.st_ctime_ns,
                )
        return stamps

    def _copy(self, stamps: dict[str, _FileStamp], source: str, target: str) -> str:
        name = os.path.relpath(source, self.live)
        if self._newest.path is not None and self._newest.stamps.get(name) == stamps.get(name):
            try:
                os.link(self._newest.path / "files" / name, target)
            except OSError:  # a file system without hard links
                shutil.copy2(source, target)
        else:
            shutil.copy2(source, target)
        return target

    def _delete_old_checkpoints(self, path: Path) -> None:
        others = [other for other in program_checkpoints(self._directory, self._trial) if other != path]
        older = [other for other in others if other.name < path.name]
        best = f"{self._best_report():06d}-"
        for other in others:  # training did not continue from a later checkpoint
            if other not in older[: _MAX_CHECKPOINTS - 1] and not other.name.startswith(best):
                stale = other.with_suffix(".stale")
                other.replace(stale)
                shutil.rmtree(stale)

    def _best_report(self) -> int:
        """Number of the best report; 0 without one."""
        number, best = 0, dict[str, float]()
        for report in self.reports:
            if report.epoch > self._start and self._of_best.improves(report.metrics, best):
                number, best = report.epoch, dict(report.metrics)
        return number

    def _wait_for_new_file_time(self, stamps: dict[str, _FileStamp]) -> None:
        """Wait until new file times differ from those in `stamps`, so that later changes are detected."""
        last = max(stamp[3] for stamp in stamps.values()) / 1e9
        left = last + _FILE_TIME_SECONDS - time.time()
        if left > 0:
            time.sleep(min(left, _FILE_TIME_SECONDS))

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
    def _ended(self) -> Path:
        return self._folder / "ended"

    @property
    def _returning(self) -> Path:
        return self._folder / "returning"

    @property
    def _process(self) -> Path:
        return self._folder / "process.json"
