"""Reading of a journal, which another process may write at the same time, and SQL access to its tables."""

import heapq
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Self, TypeVar

from shoal.core.errors import JournalError, ShoalError
from shoal.core.event import TurnStats
from shoal.core.rows import (
    NOT_FAILED,
    CheckRow,
    DeviceRow,
    Extension,
    Intervention,
    JobRow,
    Proposal,
    Quantum,
    Reservation,
    Run,
    Telemetry,
    TrialRow,
    Verdict,
)
from shoal.core.space import Space
from shoal.core.trial import FIRST_ADDED, Report, TrialState
from shoal.host.paths import absolute
from shoal.host.remedy import command
from shoal.journal.codec import intervention_of, job_row, proposal_of, report_of, trial_row, verdict_of
from shoal.journal.lock import LockOwner, lock_owner
from shoal.journal.schema import FILE_NAME, open_existing, require_read_permission, translate_errors
from shoal.spec import StudySpec

__all__ = ["JournalTables", "JournalView", "OpenJournal"]

_T = TypeVar("_T")

_STREAMED = 10_000

_NOT_UNDERSTOOD = (ValueError, TypeError, KeyError, AttributeError)
"""Errors of decoding JSON, states and types of other values."""

_TRIAL = (
    "SELECT number, config, seed, data_seed, origin, start, state, reason, epoch, target, failures, device, job, "
    "seconds, metrics, best, objective, violation, ranked, best_epoch, errors, paused_by FROM trials"
)
_REPORT = "SELECT seq, trial, epoch, metrics, seconds, state, reason FROM reports"
_JOB = (
    "SELECT id, purpose, device, trials, started, ended, outcome, message, keys, activities, resumes, assists, "
    "kill_outcome, kill_reason, "
    "(SELECT json_group_array(json_array(key, trial)) FROM (SELECT key, trial FROM joins WHERE job = id "
    "ORDER BY joins.rowid)) AS joined, "
    "time, compute, memory, cores "
    "FROM jobs LEFT JOIN reservations ON reservations.rowid = (SELECT max(rowid) FROM reservations WHERE job = id)"
)
_INTERVENTION = "SELECT seq, time, request, verb, trials, devices, text, refused FROM interventions"
_OPEN = tuple(state for state in TrialState if not state.final)

_KINDS: dict[str, tuple[type, ...]] = {
    name: kinds
    for kinds, names in (
        ((int,), "number seed data_seed start epoch target failures seq trial pid epochs free step members checks"),
        ((int, float), "seconds started violation"),
        ((str,), "config state reason device metrics best ranked errors id purpose trials outcome request verb"),
        (
            (str,),
            "activities resumes assists kill_outcome kill_reason message keys key value proposed job name node kind "
            "what newest refusal paused_by",
        ),
        ((int, NoneType), "origin memory best_epoch"),
        ((int, float, NoneType), "objective best_value ended time compute cores node_cores difference before"),
        ((bytes,), "data"),
    )
    for name in names.split()
}
"""Types of the columns by name; a name has the same type in all tables. SQLite itself accepts any value."""


class JournalTables:
    """The tables of one journal, read and written by SQL."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self.connection = connection

    def rows(self, sql: str, *values: object) -> list[Any]:
        """All rows that a statement returns."""
        return list(self.stream(sql, *values))

    def stream(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of `rows` as they are read, for tables that are larger than memory should hold."""
        with translate_errors(self.directory):
            cursor = self.connection.execute(sql, values)
        names = [column for column, *_ in cursor.description or ()]
        kinds = [(column, _KINDS[name]) for column, name in enumerate(names) if name in _KINDS]
        while True:
            with translate_errors(self.directory):
                rows = cursor.fetchmany(_STREAMED)
            if not rows:
                return
            for column, kind in kinds:
                if all(issubclass(found, kind) for found in {type(row[column]) for row in rows}):
                    continue
                row = next(row for row in rows if not isinstance(row[column], kind))
                raise self.damaged(f"`{names[column]}` is {row[column]!r} where `{names[0]}` is {row[0]!r}")
            yield from rows

    def read(self, what: str, decode: Callable[[tuple[Any, ...]], _T], sql: str, *values: object) -> list[_T]:
        """All rows that a query returns, each as an object; see `decoded` for the arguments and the error."""
        return [self.decoded(what, decode, row) for row in self.rows(sql, *values)]

    def decoded(self, what: str, decode: Callable[[tuple[Any, ...]], _T], row: tuple[Any, ...]) -> _T:
        """One row as an object."""
        try:
            return decode(row)
        except _NOT_UNDERSTOOD as error:
            raise self._not_understood(f"{what} {row[0]!r}", error) from error

    @contextmanager
    def decoding(self, what: str) -> Iterator[None]:
        """Turn decoding errors inside the block into an error that names the damaged part."""
        try:
            yield
        except _NOT_UNDERSTOOD as error:
            raise self._not_understood(what, error) from error

    def _not_understood(self, what: str, error: Exception) -> JournalError:
        return self.damaged(f"{what} is not understood ({type(error).__name__}: {error})")

    def damaged(self, how: str) -> JournalError:
        """An error that says how the journal is damaged, with the remedy."""
        file = self.directory / FILE_NAME
        return JournalError(f"the journal {file} is damaged: {how}; restore an older copy of it, if there is one")


class OpenJournal:
    """The open file of a study's journal.

    Attributes:
        spec: Specification of the study, which never changes.
        study: Values that change while the study runs, each but `sources` and `script` absent until its first change:
            `sources`, `script` and `edits` of the task, `policy` and `fleet` as users have last chosen them, `paused`,
            `note`, `savings`, `time_left`, `extensions` with their `totals`, `finished`, how it ended.
    """

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self.tables = JournalTables(directory, connection)
        with self.tables.decoding("its study"):
            self.study: dict[str, Any] = {
                key: json.loads(value) for key, value in self.tables.rows("SELECT key, value FROM study")
            }
            try:
                self.spec = StudySpec.from_json(self.study.pop("spec"))
            except ShoalError as error:
                raise self.tables.damaged(f"of its study {error}") from error
        self.objectives = self.spec.objectives

    def blob(self, name: str) -> bytes:
        """The pickled "task" or "algorithm", as given to `Journal.create`."""
        rows = self.tables.rows("SELECT data FROM blobs WHERE name = ?", name)
        if not rows:
            raise self.tables.damaged(f"its pickled {name} is missing")
        return bytes(rows[0][0])

    def writer(self) -> LockOwner | None:
        """The process that runs the study now; None if no process does."""
        with require_read_permission(self.directory):
            return lock_owner(self.directory)

    def close(self) -> None:
        """Close the file; may be called twice."""
        self.tables.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class JournalView(OpenJournal):
    """A read-only view of a study's journal. Every call sees all committed transactions."""

    @staticmethod
    def read(directory: Path | str) -> "JournalView":
        """Open the journal of a study for reading."""
        directory = absolute(directory)
        with ExitStack() as undo:
            connection = open_existing(directory, write=False)
            undo.callback(connection.close)
            view = JournalView(directory, connection)
            undo.pop_all()
        return view

    @property
    def space(self) -> Space:
        """Search space of the study."""
        with self.tables.decoding("the space of its study"):
            return Space.from_json(self.spec.space)

    @property
    def policy(self) -> str:
        """The study's policy, or the one that a user has chosen since, as `StudySpec.policy`."""
        return str(self.study.get("policy", self.spec.policy))

    def trials(self, numbers: Iterable[int] | None = None) -> list[TrialRow]:
        """All trials, or only those with these numbers, by number."""
        if numbers is None:
            return self.tables.read("trial", trial_row, f"{_TRIAL} ORDER BY number")
        chosen = f"{_TRIAL} WHERE number IN (SELECT value FROM json_each(?)) ORDER BY number"
        return self.tables.read("trial", trial_row, chosen, json.dumps(list(numbers)))

    def configurations(self) -> list[TrialRow]:
        """A row for each configuration: the trials of a study without repeats, else `ConfigurationRow`s."""
        return self.spec.configurations(self.trials())

    @property
    def keep(self) -> int | str:
        """Which ended trials keep their weights now, as `keep` of `tune`."""
        return self.study.get("keep", self.spec.keep)  # type: ignore[no-any-return]

    def changed_trials(self, known: dict[int, int]) -> list[TrialRow]:
        """The trials whose rows are new or have changed, by number; the others are not decoded.

        Rows of trials that are COMPLETE or STOPPED are not even read again, since nothing changes them.

        Args:
            known: Number of each trial -> hash of its row when this was called last, 0 if that row is final; updated.
        """
        ended = json.dumps([number for number, found in known.items() if not found])
        rows = self.tables.rows(
            f"{_TRIAL} WHERE state IN ({', '.join('?' * len(_OPEN))}) "
            "OR number NOT IN (SELECT value FROM json_each(?)) ORDER BY number",
            *(*_OPEN, ended),
        )
        changed = []
        for row in rows:
            if known.get(row[0]) != (found := hash(row) or 1):
                trial = self.tables.decoded("trial", trial_row, row)
                known[trial.number] = found if trial.state in (*_OPEN, TrialState.FAILED) else 0
                changed.append(trial)
        return changed

    def best(self) -> TrialRow | None:
        """The feasible trial with the best value of the study's metric, of those not FAILED; of equal trials the one
        with the lowest number.

        Of several metrics only the first counts; see `shoal.core.ranking.front`.
        """
        direction = "ASC" if self.objectives[0].mode == "min" else "DESC"
        return self._first("AND violation = 0", f"objective {direction}")

    def least_violating(self) -> TrialRow | None:
        """The trial with a value, of those not FAILED, that violates the constraints least; the first of equal ones."""
        return self._first("", "violation")

    def _first(self, condition: str, order: str) -> TrialRow | None:
        rows = self.tables.read(
            "trial",
            trial_row,
            f"{_TRIAL} WHERE objective IS NOT NULL AND state <> ? {condition} ORDER BY {order}, number LIMIT 1",
            TrialState.FAILED,
        )
        return rows[0] if rows else None

    def curve(self, trial: int) -> list[Report]:
        """Reports of a trial, in the order of arrival."""
        return self.tables.read("report", report_of, f"{_REPORT} WHERE trial = ? ORDER BY seq", trial)

    def reports_after(self, seq: int, limit: int, trial: int | None = None) -> list[tuple[int, float, Report]]:
        """The first report of each epoch of each trial, of those recorded after a position, in order.

        Reports of failures are left out, and so are repetitions of an epoch that only change the trial's state.

        Args:
            seq: Position in the one sequence of asks, reports and interventions.
            trial: Number of the only trial; None: all.

        Returns:
            `seq`, time in seconds since 1970, and the report.
        """
        rows = self.tables.rows(
            "SELECT seq, time, trial, epoch, metrics, seconds, state, reason FROM reports AS own WHERE seq > ? "
            f"AND trial {'IS NOT' if trial is None else '='} ? AND state <> ? AND NOT EXISTS "
            "(SELECT 1 FROM reports AS other WHERE other.trial = own.trial AND other.epoch = own.epoch "
            "AND other.seq < own.seq AND other.state <> ?) ORDER BY seq LIMIT ?",
            *(seq, trial, TrialState.FAILED, TrialState.FAILED, limit),
        )
        return [(row[0], row[1], self.tables.decoded("report", report_of, (row[0], *row[2:]))) for row in rows]

    def best_values(self) -> list[tuple[float, float]]:
        """Time in seconds since 1970, and the value of the best trial by the first metric from then on."""
        return self.tables.rows("SELECT time, best_value FROM reports WHERE best_value IS NOT NULL ORDER BY seq")

    def begun_states(self) -> dict[int, TrialState]:
        """Number of each trial that has begun to train or has ended -> its state, by number."""
        rows = self.tables.rows(
            "SELECT number, state FROM trials "
            f"WHERE job <> '' OR epoch > start OR state NOT IN ({', '.join('?' * len(_OPEN))}) ORDER BY number",
            *_OPEN,
        )
        with self.tables.decoding("the state of a trial"):
            return {number: TrialState(state) for number, state in rows}

    def reported_states(self) -> dict[int, dict[int, tuple[TrialState, ...]]]:
        """Number of each trial that may continue -> epoch -> states with which it was reported, without FAILED."""
        rows = self.tables.rows(
            "SELECT trial, reports.epoch, reports.state FROM reports JOIN trials ON number = trial "
            "WHERE reports.state <> ? AND trials.state NOT IN (?, ?) ORDER BY seq",
            TrialState.FAILED,
            TrialState.COMPLETE,
            TrialState.STOPPED,
        )
        found: dict[int, dict[int, tuple[TrialState, ...]]] = {}
        for trial, epoch, state in rows:
            epochs = found.setdefault(trial, {})
            epochs[epoch] = (*epochs.get(epoch, ()), TrialState(state))
        return found

    def checkpoints(self) -> dict[int, str]:
        """Number of each trial with a checkpoint -> beginning of the name of the newest one that was reported."""
        query = "SELECT trial, max(checkpoint) FROM reports WHERE checkpoint <> '' GROUP BY trial"
        return dict(self.tables.rows(query))

    @property
    def retried(self) -> dict[int, int]:
        """Number of each trial that was retried after it had failed -> the `seq` of its first retry.

        The algorithm does not observe later reports of such a trial.
        """
        sql = (
            "SELECT number.value AS trial, min(seq) FROM interventions, json_each(trials) AS number "
            "WHERE verb = 'retry' GROUP BY trial"
        )
        return dict(self.tables.rows(sql))

    def interventions(self) -> list[Intervention]:
        """Requests of users that were carried out or refused, in order."""
        return self.tables.read("intervention", intervention_of, f"{_INTERVENTION} ORDER BY seq")

    def intervention(self, request: str) -> Intervention | None:
        """Result of a request; None while it is pending."""
        found = self.tables.read("intervention", intervention_of, f"{_INTERVENTION} WHERE request = ?", request)
        return found[0] if found else None

    def events(self) -> Iterator[Proposal | Report | Extension]:
        """Inputs of the algorithm, in order. Repeating these calls restores its state.

        Empty proposals are left out, and so are reports of retried trials and of trials that users added.
        """
        retried = self.retried
        trials = {row.number: row.trial for row in self.trials()}
        proposals = self.tables.rows("SELECT seq, free, proposed FROM proposals ORDER BY seq")
        with self.tables.decoding("a proposal of its algorithm"):
            decoded = [(seq, proposal_of(free, proposed, trials)) for seq, free, proposed in proposals]
        extensions = [(each["seq"], Extension(**each)) for each in self.study.get("extensions", ())]
        calls: list[tuple[int, Proposal | Report | Extension]] = sorted([*decoded, *extensions], key=itemgetter(0))
        rows = self.tables.stream(f"{_REPORT} WHERE trial < ? ORDER BY seq", FIRST_ADDED)
        reports = (
            (seq, self.tables.decoded("report", report_of, (seq, *row)))
            for seq, *row in rows
            if seq <= retried.get(row[0], seq)
        )
        for _, event in heapq.merge(calls, reports, key=itemgetter(0)):
            yield event

    def jobs(self, *, running: bool = False) -> list[JobRow]:
        """All jobs in the order of their start, or only those that have not ended."""
        where = "WHERE ended IS NULL" if running else ""
        return self.tables.read("job", job_row, f"{_JOB} {where} ORDER BY jobs.rowid")

    def last_seq(self) -> int:
        """Largest `seq` of all proposals, reports and interventions; 0 without any."""
        tables = "SELECT seq FROM proposals UNION ALL SELECT seq FROM reports UNION ALL SELECT seq FROM interventions"
        ((last,),) = self.tables.rows(f"SELECT coalesce(max(seq), 0) FROM ({tables})")
        return int(last)

    def failures(self) -> list[tuple[TrialRow, JobRow | None]]:
        """Open trials with failures, each with its newest failed job; None if an array failed, and not its job."""
        trials = self.tables.read(
            "trial",
            trial_row,
            f"{_TRIAL} WHERE failures > 0 AND state IN (?, ?) ORDER BY number",
            TrialState.PENDING,
            TrialState.RUNNING,
        )
        found = []
        for trial in trials:
            jobs = self.tables.read(
                "job",
                job_row,
                f"{_JOB} WHERE outcome NOT IN ({', '.join('?' * len(NOT_FAILED))}) "
                "AND (EXISTS (SELECT 1 FROM json_each(trials) WHERE value = ?) "
                "OR EXISTS (SELECT 1 FROM joins WHERE job = id AND trial = ?)) ORDER BY jobs.rowid DESC LIMIT 1",
                *NOT_FAILED,
                trial.number,
                trial.number,
            )
            found.append((trial, jobs[0] if jobs else None))
        return found

    def failed(self) -> list[tuple[int, str]]:
        """Number and reason of each trial that has failed for good, by number."""
        return self.tables.rows("SELECT number, reason FROM trials WHERE state = ? ORDER BY number", TrialState.FAILED)

    def paused_trials(self) -> tuple[int, ...]:
        """Numbers of the trials that a user has paused and that have not ended, ascending."""
        rows = self.tables.rows(
            "SELECT number FROM trials WHERE paused_by <> '' "
            f"AND state IN ({', '.join('?' * len(_OPEN))}) ORDER BY number",
            *_OPEN,
        )
        return tuple(number for (number,) in rows)

    def reservations(self) -> dict[str, list[Reservation]]:
        """Id of each job -> its reservations in order, the first from its start."""
        found: dict[str, list[Reservation]] = {}
        for *reservation, job in self.tables.rows(
            "SELECT time, compute, memory, cores, job FROM reservations ORDER BY rowid"
        ):
            found.setdefault(job, []).append(Reservation(*reservation, job=job))
        return found

    def quanta(self) -> dict[str, list[Quantum]]:
        """Id of each job that has had turns -> its turns in order."""
        found: dict[str, list[Quantum]] = {}
        for job, number, time, *losses in self.tables.rows(
            "SELECT job, number, time, highest, lowest, last, steps, seconds FROM quanta ORDER BY rowid"
        ):
            found.setdefault(job, []).append(Quantum(job, number, time, TurnStats(*losses)))
        return found

    def checks(self, trial: int | None = None) -> list[CheckRow]:
        """Comparisons of trials of arrays with plain PyTorch, in order: of all trials, or of one."""
        where = "" if trial is None else "WHERE trial = ?"
        sql = (
            f"SELECT job, key, trial, members, epoch, step, what, difference, reason FROM checks {where} ORDER BY rowid"
        )
        return [CheckRow(*row) for row in self.tables.rows(sql, *([] if trial is None else [trial]))]

    def verdicts(self, key: str | None = None) -> list[Verdict]:
        """Verdicts on the structures, by key: of all keys, or of one."""
        where = "" if key is None else "WHERE key = ?"
        sql = (
            "SELECT key, trials, members, checks, difference, newest, refusal, epoch, step "
            f"FROM verdicts {where} ORDER BY key"
        )
        return self.tables.read("verdict", verdict_of, sql, *([] if key is None else [key]))

    def telemetry(self) -> list[Telemetry]:
        """Use of the GPUs, in order; a row where it has changed."""
        rows = self.tables.rows("SELECT time, device, utilisation, memory FROM telemetry ORDER BY rowid")
        return [Telemetry(*row) for row in rows]

    def devices(self, *, all_runs: bool = False) -> list[DeviceRow]:
        """Devices of the newest run in order, each as last recorded, removed ones included.

        Args:
            all_runs: Whether to include devices that only earlier runs had.
        """
        rows = self.tables.rows(
            "SELECT run, name, node, node_cores, kind, memory, cores, compute, healthy, reason FROM devices "
            "ORDER BY rowid"
        )
        found: dict[str, tuple[int, DeviceRow]] = {}
        for run, name, node, node_cores, kind, memory, cores, compute, healthy, reason in rows:
            if name in found and found[name][0] != run:
                del found[name]  # its place is that of its first row in its newest run
            device = DeviceRow(name, node, node_cores, kind, memory, cores, compute, bool(healthy), reason)
            found[name] = run, device
        return [device for run, device in found.values() if all_runs or run == rows[-1][0]]

    def last_moment(self) -> float | None:
        """Time of the newest report, or start or end of a job, in seconds since 1970; None before the first."""
        rows = self.tables.rows(
            "SELECT time FROM (SELECT time FROM reports ORDER BY seq DESC LIMIT 1) "
            "UNION SELECT max(started) FROM jobs UNION SELECT max(ended) FROM jobs"
        )
        return max((time for (time,) in rows if time is not None), default=None)

    def runs(self) -> list[Run]:
        """All runs of the study, the newest last."""
        runs = [Run(*row) for row in self.tables.rows("SELECT pid, started, epochs, before FROM runs ORDER BY number")]
        if not runs:
            raise JournalError(
                f"no process has run the study in {self.directory} yet; begin with: {command('resume', self.directory)}"
            )
        return runs
