"""Writing of a journal: the rows of each step are committed before the engine acts on them."""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from shoal.core.errors import JournalError, StudyMovedError
from shoal.core.rows import (
    CheckRow,
    Deletion,
    DeviceRow,
    Intervention,
    JobRow,
    Joined,
    Proposal,
    Quantum,
    ReportRow,
    Reservation,
    Row,
    StudyValue,
    Telemetry,
    TrialRow,
    Verdict,
)
from shoal.core.trial import Trial
from shoal.host.paths import absolute
from shoal.host.remedy import command
from shoal.host.sources import Edit, imported_files, sources
from shoal.journal.codec import encode, metrics_text, storable
from shoal.journal.lock import WriterLock
from shoal.journal.schema import FILE_NAME, checked_file, connect, create_tables, open_existing, translate_errors
from shoal.journal.storage import set_journal_mode
from shoal.journal.view import JournalView
from shoal.spec import StudySpec

__all__ = ["Journal"]


class Journal(JournalView):
    """A study's journal that only this process may write while it is open.

    A `kill -9` loses no committed transaction, and leaves no partial one.

    Args:
        clock: Clock, in seconds since 1970.
    """

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: WriterLock, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, connection)
        self._lock = lock
        self.clock = clock
        self._path = str(directory / FILE_NAME)
        self._file = os.stat(self._path)
        set_journal_mode(directory, connection)

    @classmethod
    def create(
        cls,
        directory: Path | str,
        spec: StudySpec,
        study: Mapping[str, Any] = MappingProxyType({}),
        *,
        task: bytes,
        algorithm: bytes,
        clock: Callable[[], float] = time.time,
        called: float | None = None,
    ) -> Self:
        """Create a study and begin its first run.

        Args:
            study: First values of those that change, see `JournalView.study`; JSON values.
            called: As in `begin_run`.

        Raises:
            StudyExistsError: the directory holds a study.
            JournalError: the directory cannot be written, or another process is creating a study there.
        """
        directory = absolute(directory)
        checked_file(directory)  # before it is made
        described = {"spec": spec.to_json(), **study}
        values = {key: encode(value, f"the study's {key!r}") for key, value in described.items()}
        with translate_errors(directory, begun=False), ExitStack() as undo:
            directory.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = connect(directory, "rwc")
            undo.callback(connection.close)
            create_tables(directory, connection, values, {"task": task, "algorithm": algorithm})
            journal = cls(directory, connection, lock, clock)
            journal.begin_run(called)
            undo.pop_all()
        return journal

    @classmethod
    def open(cls, directory: Path | str, *, clock: Callable[[], float] = time.time) -> Self:
        """Open a study for writing; nothing of it changes before `begin_run`."""
        directory = absolute(directory)
        open_existing(directory, write=True).close()  # raises before a lock file is made where there is no study
        with translate_errors(directory), ExitStack() as undo:
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = open_existing(directory, write=True)
            undo.callback(connection.close)
            journal = cls(directory, connection, lock, clock)
            undo.pop_all()
        return journal

    def begin_run(self, called: float | None = None) -> None:
        """Record that this process runs the study from now on.

        Args:
            called: Time of the user's call, in seconds since 1970, as the start of the run; None: now.
        """
        with self.transaction():
            self.tables.rows(
                "INSERT INTO runs (pid, started, epochs, before) "
                "SELECT ?, ?, coalesce(sum(epoch - start), 0), ? FROM trials",
                os.getpid(),
                self.clock() if called is None else called,
                self.last_moment(),
            )

    def check_place(self) -> None:
        """Check that the journal is where it was opened.

        Raises:
            StudyMovedError: its directory was moved or removed, or the journal alone; the message says which.
        """
        try:
            if os.path.samestat(os.stat(self._path), self._file):
                return
        except OSError:
            pass
        now = self._lock.directory()
        if now is None:
            fate = "was removed while it ran, and its records with it; begin it again"
        elif self.directory.exists() and now.samefile(self.directory):
            fate = f"has no journal any more: {FILE_NAME} was removed or replaced while it ran; begin it again"
        else:
            fate = (
                f"was moved to {now} while it ran. All until then is recorded; resume it with: {command('resume', now)}"
            )
        raise StudyMovedError(f"the directory of the study, {self.directory}, {fate}")

    def close(self) -> None:
        """Close the file and free the writer's lock; may be called twice."""
        super().close()
        self._lock.release()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction; it may be nested. After an exception or a kill nothing inside is recorded."""
        if self.tables.connection.in_transaction:
            yield
            return
        self.tables.rows("BEGIN IMMEDIATE")
        try:
            yield
            self.tables.rows("COMMIT")
        except BaseException:
            if self.tables.connection.in_transaction:  # SQLite rolls back by itself after some errors
                self.tables.rows("ROLLBACK")
            raise

    def put(self, key: str, value: object) -> None:
        """Record a changed value of the study."""
        text = encode(value, f"the study's {key!r}")
        self.tables.rows("INSERT OR REPLACE INTO study (key, value) VALUES (?, ?)", key, text)
        self.study[key] = json.loads(text)

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows in one transaction; raises StorageFullError if the disk is full, and writes none then.

        Rows of trials, jobs, verdicts and values of the study replace earlier ones; all others are added, those of each
        kind in order. Each new trial comes before its row.
        """
        if not rows:
            return
        by_kind: dict[type[Row], list[Any]] = {}
        for row in rows:
            by_kind.setdefault(type(row), []).append(row)
        with self.transaction(), translate_errors(self.directory):
            for kind, some in by_kind.items():
                if kind is StudyValue:
                    for value in some:
                        self.put(value.key, value.value)
                else:
                    sql, columns = _TABLES[kind]
                    written = self.tables.connection.executemany(sql, map(columns, some)).rowcount
                    if kind is TrialRow and written < len(some):
                        lacking = f"{len(some) - written} of {len(some)} rows are of trials that it lacks"
                        raise JournalError(f"the journal in {self.directory} has not changed, as {lacking}")

    def record_edits(self, edits: Sequence[Edit]) -> None:
        """Record that the study continues with edited source files of its task, whose contents become the reference.

        `study["edits"]` gets an entry with the time, the changes by file, and the trials that had not ended.
        """
        trials = self.trials()
        open_ = [row.number for row in trials if not row.state.final]
        entry = {
            "time": self.clock(),
            "files": {edit.path: edit.text for edit in edits},
            "open": open_,
            "next": sum(not row.trial.is_added for row in trials),
        }
        with self.transaction():
            self.put("edits", [*self.study.get("edits", []), entry])
            files = [Path(path) for path in self.study["sources"]]
            project = self.spec.project
            self.put("sources", sources(imported_files(files, Path(project)) if project else files))


def _insert(table: str, columns: str, *, key: str = "", changes: str = "", or_ignore: bool = False) -> str:
    """An SQL statement that adds a row; one with the same key gets the new values of the columns `changes` instead.

    A row of a device gets the number of the newest run.
    """
    names = columns.split()
    values = ", ".join("(SELECT max(number) FROM runs)" if name == "run" else "?" for name in names)
    changed = ", ".join(f"{name} = excluded.{name}" for name in changes.split())
    replaces = f" ON CONFLICT ({key}) DO UPDATE SET {changed}" if key else ""
    return f"INSERT {'OR IGNORE ' if or_ignore else ''}INTO {table} ({', '.join(names)}) VALUES ({values}){replaces}"


def _proposal(row: Proposal) -> tuple[object, ...]:
    proposed = [
        {"name": group.name, "epochs": group.budget.epochs, "trials": [trial.number for trial in group.trials]}
        for group in row.groups
    ]
    return row.seq, row.time, row.free, json.dumps(proposed)


def _report(row: ReportRow) -> tuple[object, ...]:
    report, metrics = row.report, metrics_text(row.report.metrics)
    return (
        *(row.seq, row.time, row.job, report.trial, report.epoch, report.state, storable(report.reason)),
        *(report.seconds, metrics, report.checkpoint, row.best_value),
    )


def _trial(trial: Trial) -> tuple[object, ...]:
    config = encode(trial.config, f"the config of trial {trial.number}")
    origin = None if trial.origin is None else trial.origin.trial
    return trial.number, config, trial.seed, trial.data_seed, origin, trial.start


def _trial_row(row: TrialRow) -> tuple[object, ...]:
    metrics = metrics_text(row.metrics)
    best, ranked = (metrics if each == row.metrics else metrics_text(each) for each in (row.best, row.ranked))
    return (
        *(row.state, storable(row.reason), row.epoch, row.target, row.failures, row.device, row.job, row.seconds),
        *(metrics, best, row.objective, row.violation, ranked, row.best_epoch, metrics_text(row.errors)),
        *(storable(row.paused_by), row.trial.number),
    )


def _job(row: JobRow) -> tuple[object, ...]:
    kill = ("", "") if row.kill is None else (row.kill.outcome, storable(row.kill.reason))
    activities = {activity: round(seconds, 6) for activity, seconds in row.activities.items()}
    return (
        *(row.id, row.purpose, row.device, json.dumps(row.trials), row.started, row.ended, row.outcome),
        *(storable(row.message), json.dumps(row.members), *kill, json.dumps(activities), row.resumes, row.assists),
    )


def _reservation(row: Reservation) -> tuple[object, ...]:
    return row.job, row.time, row.compute, row.memory, row.cores


def _intervention(row: Intervention) -> tuple[object, ...]:
    lists = map(json.dumps, (row.trials, row.devices, [storable(line) for line in row.refused]))
    return row.seq, row.time, row.request, storable(row.verb), storable(row.text), *lists


def _device(row: DeviceRow) -> tuple[object, ...]:
    place = row.name, row.node, row.node_cores, row.kind, row.memory, row.cores, row.compute
    return row.time, *place, row.healthy, storable(row.reason)


def _quantum(row: Quantum) -> tuple[object, ...]:
    return row.job, row.number, row.time, *astuple(row.losses)


def _check(row: CheckRow) -> tuple[object, ...]:
    return *astuple(row)[:-1], storable(row.reason)


def _verdict(row: Verdict) -> tuple[object, ...]:
    others = row.members, row.checks, row.difference, row.newest, storable(row.refusal), row.epoch, row.step
    return row.key, json.dumps(row.trials), *others


_TABLES: Mapping[type[Row], tuple[str, Callable[[Any], tuple[object, ...]]]] = {
    Proposal: (_insert("proposals", "seq time free proposed"), _proposal),
    # A retried trial may fail again at the same epoch.
    ReportRow: (
        _insert(
            "reports",
            "seq time job trial epoch state reason seconds metrics checkpoint best_value",
            or_ignore=True,
        ),
        _report,
    ),
    Trial: (_insert("trials", "number config seed data_seed origin start"), _trial),
    TrialRow: (
        "UPDATE trials SET (state, reason, epoch, target, failures, device, job, seconds, metrics, best, objective, "
        "violation, ranked, best_epoch, errors, paused_by) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "WHERE number = ?",
        _trial_row,
    ),
    JobRow: (
        _insert(
            "jobs",
            "id purpose device trials started ended outcome message keys kill_outcome kill_reason activities resumes "
            "assists",
            key="id",
            changes="ended outcome message kill_outcome kill_reason activities",
        ),
        _job,
    ),
    Joined: (_insert("joins", "job key trial"), astuple),
    Reservation: (_insert("reservations", "job time compute memory cores"), _reservation),
    Intervention: (_insert("interventions", "seq time request verb text trials devices refused"), _intervention),
    DeviceRow: (
        _insert("devices", "time run name node node_cores kind memory cores compute healthy reason"),
        _device,
    ),
    Quantum: (_insert("quanta", "job number time highest lowest last steps seconds"), _quantum),
    Telemetry: (_insert("telemetry", "time device utilisation memory"), astuple),
    Deletion: (_insert("deletions", "trial weights time"), astuple),
    CheckRow: (_insert("checks", "job key trial members epoch step what difference reason"), _check),
    Verdict: (
        _insert(
            "verdicts",
            "key trials members checks difference newest refusal epoch step",
            key="key",
            changes="trials members checks difference newest refusal epoch step",
        ),
        _verdict,
    ),
}
