"""Reading a journal, also while another process writes it."""

import heapq
import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.core.errors import JournalError
from shoal.core.job import Purpose
from shoal.core.objective import objectives
from shoal.core.space import Space
from shoal.core.trial import FIRST_ADDED, Report, TrialState
from shoal.journal.codec import intervention_of, job_row, metrics_of, proposal_of, report_of, trial_row
from shoal.journal.lock import holder
from shoal.journal.rows import UNFAILED, DeviceRow, Intervention, JobRow, Proposal, Reservation, Run, TrialRow
from shoal.journal.schema import FILE_NAME, open_existing, readable, translated
from shoal.paths import absolute
from shoal.remedy import command

__all__ = ["JournalView"]

_TRIAL = (
    "SELECT number, config, seed, data_seed, origin, start, state, reason, epoch, target, failures, device, job, "
    "seconds, metrics, best, objective FROM trials"
)
_REPORT = "SELECT seq, trial, epoch, metrics, seconds, state, reason FROM reports"
_JOB = (
    "SELECT id, purpose, device, trials, started, ended, outcome, message, keys, (SELECT json_group_array(json_array("
    "key, trial)) FROM (SELECT key, trial FROM joins WHERE job = id ORDER BY joins.rowid)) AS joined, "
    "time, compute, memory, cores "
    "FROM jobs LEFT JOIN promises ON promises.rowid = (SELECT max(rowid) FROM promises WHERE job = id)"
)
_INTERVENTION = "SELECT seq, time, request, verb, trials, devices, text, refused FROM interventions"
_LATELY = 500
"""So many of the last reports, of all jobs together, say how fast jobs are now."""
_UNENDED = (TrialState.PENDING, TrialState.RUNNING)
_OPEN = tuple(state for state in TrialState if not state.final)

_WHOLE = ("number", "seed", "data_seed", "start", "epoch", "target", "failures", "seq", "trial", "pid", "epochs")
_NUMBER = ("seconds", "started")
_TEXT = (
    "config",
    "state",
    "reason",
    "device",
    "metrics",
    "best",
    "id",
    "purpose",
    "trials",
    "outcome",
    "request",
    "verb",
)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_WHOLE, "free"), (int,)),
    **dict.fromkeys(_NUMBER, (int, float)),
    **dict.fromkeys((*_TEXT, "message", "keys", "key", "value", "proposed", "job", "name", "node", "kind"), (str,)),
    **dict.fromkeys(("origin", "memory"), (int, type(None))),
    **dict.fromkeys(("objective", "ended", "time", "compute", "cores", "node_cores"), (int, float, type(None))),
    **dict.fromkeys(("data",), (bytes,)),
}
"""What columns hold, by their names, which mean the same in all tables. SQLite itself takes any value."""


class JournalView:
    """A study's journal, read only. Every call sees whole transactions, the newest ones included.

    Args:
        directory: of the study.
        connection: to its journal.

    Attributes:
        directory: of the study.
        study: what the study is, as given to `Journal.create`.
        objectives: what its trials are compared by.
    """

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self._connection = connection
        with self.sound("its study"):
            self.study: dict[str, Any] = {
                key: json.loads(value) for key, value in self._rows("SELECT key, value FROM study")
            }
            self.objectives = objectives(self.study["metric"], self.study["mode"])

    @staticmethod
    def read(directory: Path | str) -> "JournalView":
        """Open the journal of a study for reading.

        Raises:
            JournalError: there is no study, or one that this version cannot read.
        """
        directory = absolute(directory)
        with ExitStack() as undo:
            connection = open_existing(directory, write=False)
            undo.callback(connection.close)
            view = JournalView(directory, connection)
            undo.pop_all()
        return view

    def blob(self, name: str) -> bytes:
        """The pickled "task" or "algorithm", as given to `Journal.create`."""
        rows = self._rows("SELECT data FROM blobs WHERE name = ?", name)
        if not rows:
            raise self.damaged(f"its pickled {name} is missing")
        return bytes(rows[0][0])

    @property
    def space(self) -> Space:
        """What the study searches."""
        with self.sound("the space of its study"):
            return Space.from_json(self.study["space"])

    def trials(self) -> list[TrialRow]:
        """All trials, by number."""
        return [self._trial(row) for row in self._rows(f"{_TRIAL} ORDER BY number")]

    def best(self) -> TrialRow | None:
        """The trial with the best last value of the study's metric that has not failed; the older one of equals.

        Of several metrics only the first one is looked at; see `shoal.reporting.ranking.front`.
        """
        direction = "ASC" if self.objectives[0].mode == "min" else "DESC"
        rows = self._rows(
            f"{_TRIAL} WHERE objective IS NOT NULL AND state <> ? ORDER BY objective {direction}, number LIMIT 1",
            TrialState.FAILED,
        )
        return self._trial(rows[0]) if rows else None

    def curve(self, trial: int) -> list[Report]:
        """A trial's reports, in the order they came."""
        return [self._report(row) for row in self._rows(f"{_REPORT} WHERE trial = ? ORDER BY seq", trial)]

    def reported_states(self) -> dict[int, dict[int, tuple[TrialState, ...]]]:
        """Of trials that may go on: number -> epoch -> the states with which it was reported, FAILED left out."""
        rows = self._rows(
            "SELECT trial, reports.epoch, reports.state FROM reports JOIN trials ON number = trial "
            "WHERE reports.state <> ?1 AND trials.state NOT IN (?2, ?3) ORDER BY seq",
            TrialState.FAILED,
            TrialState.COMPLETE,
            TrialState.STOPPED,
        )
        found: dict[int, dict[int, tuple[TrialState, ...]]] = {}
        for trial, epoch, state in rows:
            epochs = found.setdefault(trial, {})
            epochs[epoch] = (*epochs.get(epoch, ()), TrialState(state))
        return found

    @property
    def retried(self) -> dict[int, int]:
        """Number of each trial that is or was tried again after it had failed -> the `seq` of its first retry.

        Its algorithm has gone on without it, and hears of none of its later reports.
        """
        sql = (
            "SELECT number.value AS trial, min(seq) FROM interventions, json_each(trials) AS number "
            "WHERE verb = 'retry' GROUP BY trial"
        )
        return dict(self._rows(sql))

    def interventions(self) -> list[Intervention]:
        """The requests of users that were carried out or refused, in order."""
        return [self._intervention(row) for row in self._rows(f"{_INTERVENTION} ORDER BY seq")]

    def intervention(self, request: str) -> Intervention | None:
        """What came of a request; None while it is pending.

        Args:
            request: its name.
        """
        for row in self._rows(f"{_INTERVENTION} WHERE request = ?", request):
            return self._intervention(row)
        return None

    def events(self) -> Iterator[Proposal | Report]:
        """What drove the algorithm, in order: the same calls bring a fresh one into the same state.

        Asks that proposed nothing are not among them, nor are reports of trials that were tried again, or that users
        have added.
        """
        retried = self.retried
        trials = {row.number: row.trial for row in self.trials()}
        proposals = self._rows("SELECT seq, free, proposed FROM asks ORDER BY seq")
        with self.sound("what its algorithm proposed"):
            asks: list[tuple[int, Proposal | Report]] = [
                (seq, proposal_of(free, proposed, trials)) for seq, free, proposed in proposals
            ]
        rows = self._rows(f"{_REPORT} WHERE trial < ? ORDER BY seq", FIRST_ADDED)
        reports = ((seq, self._report((seq, *row))) for seq, *row in rows if seq <= retried.get(row[0], seq))
        for _, event in heapq.merge(asks, reports, key=itemgetter(0)):
            yield event

    def jobs(self, *, running: bool = False) -> list[JobRow]:
        """All jobs in the order they were started, or only those that have not ended."""
        where = "WHERE ended IS NULL" if running else ""
        return [self._job(row) for row in self._rows(f"{_JOB} {where} ORDER BY jobs.rowid")]

    def failures(self) -> list[tuple[TrialRow, JobRow | None]]:
        """The trials that wait to be tried again, or are: each with the newest of its jobs that failed.

        None where an array of a job failed, and not the job.
        """
        rows = self._rows(f"{_TRIAL} WHERE failures > 0 AND state IN (?, ?) ORDER BY number", *_UNENDED)
        found = []
        for trial in map(self._trial, rows):
            jobs = self._rows(
                f"{_JOB} WHERE outcome NOT IN ({', '.join('?' * len(UNFAILED))}) "
                "AND (EXISTS (SELECT 1 FROM json_each(trials) WHERE value = ?) "
                "OR EXISTS (SELECT 1 FROM joins WHERE job = id AND trial = ?)) ORDER BY jobs.rowid DESC LIMIT 1",
                *UNFAILED,
                trial.number,
                trial.number,
            )
            found.append((trial, self._job(jobs[0]) if jobs else None))
        return found

    def unmeasured(self, since: float) -> list[tuple[int, str]]:
        """The first trial of each profile that failed, in the order of trials, and why.

        Args:
            since: seconds since 1970; profiles that began before are left out.
        """
        return self._rows(
            "SELECT json_extract(trials, '$[0]') AS trial, message FROM jobs WHERE purpose = ? AND started >= ? "
            f"AND outcome NOT IN ({', '.join('?' * len(UNFAILED))}) ORDER BY trial",
            *(Purpose.PROFILE, since, *UNFAILED),
        )

    def failed(self) -> list[tuple[int, str]]:
        """Number of each trial that has failed for good, in order, and why."""
        return self._rows("SELECT number, reason FROM trials WHERE state = ? ORDER BY number", TrialState.FAILED)

    def held(self) -> tuple[int, ...]:
        """Numbers of the trials that a user has paused and that are not over, in order."""
        numbers = self.study.get("held", ())
        if not numbers:
            return ()
        rows = self._rows(
            "SELECT number FROM trials WHERE number IN (SELECT value FROM json_each(?)) "
            f"AND state IN ({', '.join('?' * len(_OPEN))}) ORDER BY number",
            *(json.dumps(numbers), *_OPEN),
        )
        return tuple(number for (number,) in rows)

    def promises(self) -> dict[str, list[Reservation]]:
        """Id of each job -> what it was promised, as that changed; the first when it started."""
        found: dict[str, list[Reservation]] = {}
        for job, *promise in self._rows("SELECT job, time, compute, memory, cores FROM promises ORDER BY rowid"):
            found.setdefault(job, []).append(Reservation(*promise))
        return found

    def devices(self, *, all_runs: bool = False) -> list[DeviceRow]:
        """The devices of the newest run, in order, each as it was last recorded; those that were taken away, too.

        Args:
            all_runs: those that only earlier runs had, too.
        """
        runs = "" if all_runs else "WHERE run = (SELECT max(run) FROM devices)"
        rows = self._rows(
            "SELECT name, node, node_cores, kind, memory, cores, compute, healthy, reason FROM devices "
            f"WHERE rowid IN (SELECT max(rowid) FROM devices {runs} GROUP BY name) "
            "ORDER BY (SELECT min(rowid) FROM devices AS first WHERE first.name = devices.name "
            "AND first.run = devices.run)"
        )
        return [
            DeviceRow(name, node, node_cores, kind, memory, cores, compute, bool(healthy), reason)
            for name, node, node_cores, kind, memory, cores, compute, healthy, reason in rows
        ]

    def values(self) -> list[tuple[float, float]]:
        """Every value of the study's metric that was reported, of several the first: (seconds since 1970, value)."""
        name = self.objectives[0].metric
        rows = self._rows("SELECT time, metrics FROM reports ORDER BY seq")
        with self.sound("the metrics of a report"):
            return [(time, value) for time, text in rows if (value := metrics_of(text).get(name)) is not None]

    def moments(self) -> list[float]:
        """Every moment at which a job began or ended, or a trial reported, in order: seconds since 1970."""
        return [
            moment
            for (moment,) in self._rows(
                "SELECT time FROM reports UNION SELECT started FROM jobs "
                "UNION SELECT ended FROM jobs WHERE ended IS NOT NULL ORDER BY 1"
            )
        ]

    def states(self) -> dict[TrialState, int]:
        """How many trials are in each state, all states named."""
        with self.sound("the state of a trial"):
            counts = {
                TrialState(state): count
                for state, count in self._rows("SELECT state, count(*) FROM trials GROUP BY state")
            }
        return {state: counts.get(state, 0) for state in TrialState}

    def training(self) -> dict[str, int]:
        """Id of each job that trains -> how many trials are in it now."""
        return dict(self._rows("SELECT job, count(*) FROM trials WHERE state = ? GROUP BY job", TrialState.RUNNING))

    def rates(self) -> dict[str, float]:
        """Id of each job that has reported lately -> epochs of all its trials a second, by its last reports."""
        rows = self._rows(
            "SELECT job, count(*) / sum(seconds) FROM "
            f"(SELECT job, seconds FROM reports WHERE job <> '' ORDER BY seq DESC LIMIT {_LATELY}) "
            "WHERE seconds > 0 GROUP BY job"  # a last report that only says that the trial has ended takes none
        )
        return dict(rows)

    def waiting(self) -> dict[str, list[int]]:
        """Why trials wait: reason to the trials' numbers, in order; most frequent first."""
        rows = self._rows(
            "SELECT reason, group_concat(number) FROM trials WHERE state = ? "
            "GROUP BY reason ORDER BY count(*) DESC, reason",
            TrialState.PENDING,
        )
        return {reason: sorted(map(int, numbers.split(","))) for reason, numbers in rows}

    def epochs(self) -> tuple[int, int]:
        """Epochs that trials have done, and that number with what the unfinished ones are still asked for."""
        ((done, open_),) = self._rows(
            "SELECT coalesce(sum(epoch - start), 0), "
            "coalesce(sum(CASE WHEN state IN (?, ?) THEN max(target - epoch, 0) END), 0) FROM trials",
            *_UNENDED,
        )
        return done, done + open_

    def added(self) -> tuple[int, int]:
        """How many trials users have added, and epochs that these are trained in all."""
        ((trials, epochs),) = self._rows(
            "SELECT count(*), coalesce(sum(target - start), 0) FROM trials WHERE number >= ?", FIRST_ADDED
        )
        return trials, epochs

    def epochs_lost(self) -> int:
        """Epochs that trials were asked for and will not do, since they have failed."""
        rows = self._rows("SELECT sum(max(target - epoch, 0)) FROM trials WHERE state = ?", TrialState.FAILED)
        return rows[0][0] or 0

    def runs(self) -> list[Run]:
        """The processes that ran the study, the last one last."""
        runs = [Run(*row) for row in self._rows("SELECT pid, started, epochs FROM runs ORDER BY number")]
        if not runs:
            raise JournalError(
                f"nobody has run the study in {self.directory} yet; begin with: {command('resume', self.directory)}"
            )
        return runs

    def last_moment(self) -> float | None:
        """When the newest report came or a job ended last, in seconds since 1970; None before that."""
        rows = self._rows(
            "SELECT time FROM (SELECT time FROM reports ORDER BY seq DESC LIMIT 1) UNION SELECT max(ended) FROM jobs"
        )
        return max((time for (time,) in rows if time is not None), default=None)

    def writer(self) -> int | None:
        """The id of the process that is running the study now, or None."""
        with readable(self.directory):
            return holder(self.directory)

    def close(self) -> None:
        """Free the file; may be called twice."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with translated(self.directory):
            cursor = self._connection.execute(sql, values)
            rows = cursor.fetchall()
        names = [column for column, *_ in cursor.description or ()]
        kinds = [(place, _KINDS[name]) for place, name in enumerate(names) if name in _KINDS]
        for row in rows:
            for place, kind in kinds:
                if not isinstance(row[place], kind):
                    raise self.damaged(f"`{names[place]}` is {row[place]!r} where `{names[0]}` is {row[0]!r}")
        return rows

    def _trial(self, row: tuple[Any, ...]) -> TrialRow:
        with self.sound(f"trial {row[0]}"):
            return trial_row(row)

    def _job(self, row: tuple[Any, ...]) -> JobRow:
        with self.sound(f"job {row[0]!r}"):
            return job_row(row)

    def _intervention(self, row: tuple[Any, ...]) -> Intervention:
        with self.sound(f"intervention {row[0]}"):
            return intervention_of(row)

    def _report(self, row: tuple[Any, ...]) -> Report:
        with self.sound(f"report {row[0]}"):
            return report_of(row)

    @contextmanager
    def sound(self, what: str) -> Iterator[None]:
        """Say what of the journal cannot be understood.

        Raises:
            JournalError: something within could not be.
        """
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # JSON, states and types of other values
            raise self.damaged(f"{what} is not understood ({type(error).__name__}: {error})") from error

    def damaged(self, how: str) -> JournalError:
        """An error that says how the journal is damaged, and what to do."""
        file = self.directory / FILE_NAME
        return JournalError(
            f"the journal {file} is damaged: {how}; take a copy of it from before that, if there is one"
        )
