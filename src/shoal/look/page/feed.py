"""The studies of a folder; the state of one for all browsers that show it, and its changes in order."""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.core.rows import Run
from shoal.host.paths import absolute
from shoal.journal.schema import FILE_NAME
from shoal.journal.view import JournalView
from shoal.look.page.views import json_text, report_values, snapshot_view
from shoal.look.snapshot import snapshot
from shoal.look.table import trial_json

__all__ = ["StudyFeed", "file_stamp", "find_studies"]

_DEPTH = 3
"""Folders between the given one and a study, at most."""
_MOST = 1000


def find_studies(root: Path) -> dict[str, Path]:
    """Studies of a folder: path below it, or its own name -> directory; ShoalError if it does not exist."""
    root = absolute(root)
    if not root.is_dir():
        raise ShoalError(f"there is no folder {root}; name the directory of a study, or a folder of studies")
    if _may_hold_study(root):
        return {root.resolve().name: root}
    return {str(path.relative_to(root)): path for path in sorted(_below(root, _DEPTH))[:_MOST]}


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the directories of studies below a folder; links to folders are not followed."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # removed meanwhile, or not readable by this user: it shows no study
        return
    for entry in entries:
        path = Path(entry.path)
        if _may_hold_study(path):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


def _may_hold_study(folder: Path) -> bool:
    """Return whether a folder holds a study, or is closed to this user: then the page names it with that reason."""
    try:
        return (folder / FILE_NAME).is_file()
    except PermissionError:
        return True


_MAX_KEPT = 20_000
"""Most reports that are kept for browsers that are behind; one that is further behind loads the study again."""
_BATCH = 5000
_SETTLED_SECONDS = 0.05
"""Age of the last write from which on a further write shows in the time of the file."""
_LOOK_AGAIN_SECONDS = 5.0
"""Longest time between two looks, as the end of a killed process changes no file."""

Stamp = tuple[tuple[int, int], ...]


def file_stamp(directory: Path) -> Stamp:
    """Return a value that differs once the journal has been written, or a request: times and sizes of their files."""
    found = []
    for name in (FILE_NAME, f"{FILE_NAME}-wal", "requests"):
        try:
            status = (directory / name).stat()
        except OSError:  # it is not there, which is a change, too
            continue
        found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)


class StudyFeed:
    """Reads a journal again and again, and keeps what changed.

    `look` runs in one thread. `state` and `delta` may be called from another at the same time.

    Each look that finds changes counts one up. A browser knows the count of what it has, its position, and gets all
    later changes in one piece. A position is "RUN-COUNT", where RUN is new for each process of the page, and for a new
    study at the same path.
    """

    def __init__(self, name: str, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self.name, self.directory, self._clock = name, directory, clock
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self._looked = -_LOOK_AGAIN_SECONDS
        self._begin(None)

    def _begin(self, first: Run | None) -> None:
        """Forget all, and follow the study with this first run; an inode would not do, as a new file may get it."""
        self._first = first
        self._run = secrets.token_hex(4)
        self._count = 0
        self._oldest = 0  # positions before this one cannot be followed
        self._seq: int | None = None
        self._known: dict[int, int] = {}
        self._runs = False
        self._trials: dict[int, tuple[int, str]] = {}  # number -> count of the last change, JSON text
        self._reports: deque[tuple[int, list[str]]] = deque()
        self._kept = 0
        self._snapshot = ""
        self._error = ""
        self._metrics: dict[str, None] = {}

    def look(self) -> bool:
        """Read the journal if it may have changed; return whether there is something new."""
        now, stamp = self._clock(), file_stamp(self.directory)
        if stamp == self._stamp and now - self._looked < _LOOK_AGAIN_SECONDS:
            return False
        settled = all(now - written / 1e9 > _SETTLED_SECONDS for written, _ in stamp)
        begin = time.perf_counter()
        try:
            changed = self._read(now)
        except ShoalError as error:
            changed = str(error) != self._error
            with self._lock:
                self._error = str(error)
                self._count += changed
        self.seconds = time.perf_counter() - begin
        self._stamp, self._looked = stamp if settled else None, now
        return changed

    def _read(self, now: float) -> bool:
        with JournalView.read(self.directory) as journal:
            found = snapshot(journal, now)
            if (first := journal.runs()[0]) != self._first:
                with self._lock:
                    self._begin(first)
            runs = found.pid is not None
            if runs != self._runs:  # the state of a running trial has another name without a process
                self._known, self._runs = {}, runs
            rows = journal.changed_trials(self._known)
            names = [goal.metric for goal in journal.objectives]
            self._metrics |= dict.fromkeys([*names, *(name for row in rows for name in row.metrics)])
            reports = self._new_reports(journal)
            shown = json_text(
                snapshot_view(journal, found)
                | {"objectives": [{"metric": goal.metric, "mode": goal.mode} for goal in journal.objectives]}
            )
        texts = {row.number: json_text(trial_json(row, runs=runs)) for row in rows}
        with self._lock:
            if not (texts or reports or self._error or shown != self._snapshot):
                return False
            self._count += 1
            self._error, self._snapshot = "", shown
            self._trials |= {number: (self._count, text) for number, text in texts.items()}
            if reports:
                self._keep(reports)
            return True

    def _new_reports(self, journal: JournalView) -> list[str]:
        if self._seq is None:  # earlier reports are in the curves that a browser loads
            ((self._seq,),) = journal.tables.rows("SELECT coalesce(max(seq), 0) FROM reports")
            return []
        found = []
        while True:
            batch = journal.reports_after(self._seq, _BATCH)
            found += [json_text(report_values(report, moment)) for _, moment, report in batch]
            if batch:
                self._seq = batch[-1][0]
            if len(batch) < _BATCH:
                return found

    def _keep(self, reports: list[str]) -> None:
        self._reports.append((self._count, reports))
        self._kept += len(reports)
        while self._kept > _MAX_KEPT and len(self._reports) > 1:
            self._oldest, dropped = self._reports.popleft()
            self._kept -= len(dropped)

    @property
    def position(self) -> str:
        """Position after the last change."""
        return f"{self._run}-{self._count}"

    def metrics(self) -> list[str]:
        """Return the names of all reported values, those of the study's objectives first."""
        return list(self._metrics)

    def state(self) -> str:
        """Return the whole study as JSON text: position, snapshot, trials; or the error of its journal."""
        with self._lock:
            trials = ",".join(text for _, text in self._trials.values())
            return self._text(trials, "")

    def delta(self, position: str) -> tuple[str, str] | None:
        """Changes since a position, of `state` or the last one: the new position and JSON text; None without any.

        A position that cannot be followed gives `{"reload": true}`.
        """
        with self._lock:
            run, _, text = position.partition("-")
            count = int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else -1
            here = self.position
            if run != self._run or not self._oldest <= count <= self._count:
                return here, '{"reload":true}'
            if count == self._count:
                return None
            trials = ",".join(text for changed, text in self._trials.values() if changed > count)
            reports = ",".join(text for changed, some in self._reports if changed > count for text in some)
            return here, self._text(trials, reports)

    def _text(self, trials: str, reports: str) -> str:
        return (
            f'{{"study":{json_text(self.name)},"position":"{self.position}","error":{json_text(self._error)},'
            f'"snapshot":{self._snapshot or "null"},"trials":[{trials}],"reports":[{reports}]}}'
        )
