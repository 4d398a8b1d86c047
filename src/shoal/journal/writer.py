"""Writing a journal: what the engine records, before it acts on it."""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from shoal.errors import AlgorithmError, JournalError
from shoal.journal.codec import encode
from shoal.journal.lock import WriterLock
from shoal.journal.record import record
from shoal.journal.schema import connect, fill, open_existing, translated
from shoal.journal.view import JournalView
from shoal.objective import objectives
from shoal.planner.job import Job, Member, Purpose
from shoal.trial import Decision, Report, TrialGroup, TrialState

__all__ = ["Journal"]

_FINAL = "({})".format(", ".join(f"'{state}'" for state in TrialState if state.final))


class Journal(JournalView):
    """The one writer of a study's journal.

    Each method is a transaction of its own; those called inside `with journal.transaction():` are one together. What
    was recorded before a `kill -9` is there afterwards, transactions in whole.

    Args:
        directory: of the study.
        connection: to its journal.
        lock: held on it.
        clock: seconds since 1970.
    """

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: WriterLock, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, connection)
        self._lock = lock
        self._clock = clock
        self._waiting: dict[int, str] = {}  # the reasons as last recorded, so that equal ones cost no query
        # In WAL mode a kill loses nothing under NORMAL; only a power cut may lose the last transactions, whole ones.
        self._rows("PRAGMA synchronous = NORMAL")
        self._seq: int
        ((self._seq,),) = self._rows(
            "SELECT max((SELECT coalesce(max(seq), 0) FROM asks), (SELECT coalesce(max(seq), 0) FROM reports))"
        )
        with self.transaction():
            self._rows(
                "INSERT INTO runs (pid, started, epochs) SELECT ?, ?, coalesce(sum(epoch - start), 0) FROM trials",
                os.getpid(),
                clock(),
            )

    @classmethod
    def create(
        cls,
        directory: Path | str,
        study: Mapping[str, Any],
        *,
        task: bytes,
        algorithm: bytes,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Begin a study in a directory, which is made if need be.

        Args:
            directory: where the journal is to be.
            study: what the study is, in JSON values; must hold its "metric" and "mode" ("min" or "max"), or lists of
                several.
            task: the pickled task.
            algorithm: the pickled algorithm, before its first use.
            clock: seconds since 1970.

        Raises:
            StudyExistsError: the directory holds a study.
            JournalError: the directory cannot be written, or another process is just beginning a study there.
        """
        directory = Path(directory)
        try:
            objectives(study["metric"], study["mode"])
        except AlgorithmError as error:
            raise JournalError(
                f"a study has a metric and a mode 'min' or 'max', got {study['metric']!r}, {study['mode']!r}"
            ) from error
        values = {key: encode(value, f"the study's {key!r}") for key, value in study.items()}
        with translated(directory), ExitStack() as undo:
            directory.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = connect(directory, "rwc")
            undo.callback(connection.close)
            fill(directory, connection, values, {"task": task, "algorithm": algorithm})
            journal = cls(directory, connection, lock, clock)
            undo.pop_all()
        return journal

    @classmethod
    def open(cls, directory: Path | str, *, clock: Callable[[], float] = time.time) -> Self:
        """Go on with a study.

        Raises:
            JournalError: there is none, another process is running it, or this version cannot read it.
        """
        directory = Path(directory)
        open_existing(directory, write=False).close()  # leave no lock file where there is no study
        with translated(directory), ExitStack() as undo:
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = open_existing(directory, write=True)
            undo.callback(connection.close)
            journal = cls(directory, connection, lock, clock)
            undo.pop_all()
        return journal

    def close(self) -> None:
        """Free the file and let another process write; may be called twice."""
        super().close()
        self._lock.release()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Record what is inside wholly or, after an exception or a kill, not at all; may be nested.

        Raises:
            StorageFullError: the disk is full; nothing of this transaction is recorded.
        """
        if self._connection.in_transaction:
            yield
            return
        self._rows("BEGIN IMMEDIATE")
        try:
            yield
            self._rows("COMMIT")
        except BaseException:
            self._waiting = {}
            if self._connection.in_transaction:  # SQLite rolls back by itself after some errors
                self._rows("ROLLBACK")
            raise

    def asked(self, free: int, groups: Sequence[TrialGroup]) -> None:
        """The algorithm was asked for groups: their trials are new, or promoted, and wait.

        An answer without groups leaves no trace: it is the same to the algorithm whether it was asked.

        Args:
            free: what it was told of the trials that could start.
            groups: what it returned.
        """
        if not groups:
            return
        proposed = [
            {"name": group.name, "epochs": group.budget.epochs, "trials": [trial.number for trial in group.trials]}
            for group in groups
        ]
        rows = [
            (
                trial.number,
                encode(trial.config, f"the config of trial {trial.number}"),
                trial.seed,
                trial.data_seed,
                None if trial.origin is None else trial.origin.trial,
                trial.start,
                trial.start,
                TrialState.PENDING,
                group.budget.epochs,
            )
            for group in groups
            for trial in group.trials
        ]
        with self.transaction():
            self._rows(
                "INSERT INTO asks (seq, time, free, proposed) VALUES (?, ?, ?, ?)",
                self._next(),
                self._clock(),
                free,
                json.dumps(proposed),
            )
            self._many(
                "INSERT INTO trials (number, config, seed, data_seed, origin, start, epoch, state, target) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (number) DO UPDATE SET state = excluded.state, target = excluded.target, reason = ''",
                rows,
            )

    def reported(self, job: str, reports: Iterable[Report]) -> list[Report]:
        """Trials of a job have reported.

        After a resume a worker may repeat epochs that are recorded. Such a report is no news, unless it says for the
        first time that the trial is PAUSED or FAILED there. Nor is a report of a trial whose state is final.

        Args:
            job: its id; "" when the engine itself says that a trial failed.
            reports: in the order they came.

        Returns:
            Those that are news, for the algorithm to observe in this order.

        Raises:
            JournalError: a trial that was never asked for.
        """
        with self.transaction(), translated(self.directory):
            return [
                report
                for report in reports
                if record(self._connection, self._next(), self._clock(), job, report, self.objectives)
            ]

    def decided(self, decisions: Iterable[Decision]) -> None:
        """The algorithm has ended trials; one whose state is final already keeps it."""
        self._many(
            f"UPDATE trials SET state = ?, reason = ? WHERE number = ? AND state NOT IN {_FINAL}",
            [(decision.state, decision.reason, decision.trial) for decision in decisions],
        )

    def waiting_reasons(self, reasons: Mapping[int, str]) -> None:
        """Why trials wait: all that do, each time; only what has changed is written.

        Args:
            reasons: trial number to reason.
        """
        changed = [(reason, trial) for trial, reason in reasons.items() if self._waiting.get(trial) != reason]
        if changed:
            self._many("UPDATE trials SET reason = ? WHERE number = ? AND state = 'pending'", changed)
        self._waiting = dict(reasons)

    def job_started(self, job: Job, device: str) -> None:
        """A job is about to start on a device; the members of a training job are now RUNNING."""
        numbers = [member.trial.number for member in job.members]
        with self.transaction():
            self._rows(
                "INSERT INTO jobs (id, purpose, device, trials, started) VALUES (?, ?, ?, ?, ?)",
                job.id,
                job.purpose,
                device,
                json.dumps(numbers),
                self._clock(),
            )
            if job.purpose is Purpose.TRAIN:
                self._train(job.id, device, numbers)

    def joined(self, job: str, device: str, members: Sequence[Member]) -> None:
        """Members are about to join a running job; they are now RUNNING."""
        numbers = [member.trial.number for member in members]
        with self.transaction():
            ((before,),) = self._rows("SELECT trials FROM jobs WHERE id = ?", job)
            trials = list(dict.fromkeys([*json.loads(before), *numbers]))
            self._rows("UPDATE jobs SET trials = ? WHERE id = ?", json.dumps(trials), job)
            self._train(job, device, numbers)

    def job_ended(self, job: str, outcome: str, message: str = "", *, failed: bool) -> dict[int, int]:
        """A job is over: its trials that are still RUNNING wait again.

        Args:
            job: its id.
            outcome: how it ended.
            message: what the back end said of it.
            failed: count this as a failure of the trials that wait again.

        Returns:
            These trials' numbers, each with its count of failures.
        """
        with self.transaction():
            self._rows(
                "UPDATE jobs SET ended = ?, outcome = ?, message = ? WHERE id = ?", self._clock(), outcome, message, job
            )
            return dict(
                self._rows(
                    "UPDATE trials SET state = ?, failures = failures + ? WHERE array = ? AND state = ? "
                    "RETURNING number, failures",
                    TrialState.PENDING,
                    int(failed),
                    job,
                    TrialState.RUNNING,
                )
            )

    def dropped(self, job: str, trials: Iterable[int], *, failed: bool) -> dict[int, int]:
        """A job trains some of its trials no more: those that are still RUNNING there wait again.

        Args:
            job: its id.
            trials: their numbers.
            failed: as for `job_ended`.

        Returns:
            As of `job_ended`.
        """
        with self.transaction():
            return dict(
                self._rows(
                    "UPDATE trials SET state = ?, failures = failures + ? WHERE array = ? AND state = ? "
                    "AND number IN (SELECT value FROM json_each(?)) RETURNING number, failures",
                    TrialState.PENDING,
                    int(failed),
                    job,
                    TrialState.RUNNING,
                    json.dumps(sorted(trials)),
                )
            )

    def requeue_running(self) -> None:
        """Nothing runs any more, since the process that ran it is gone: RUNNING trials wait, open jobs are ended."""
        with self.transaction():
            self._rows(
                "UPDATE jobs SET ended = ?, outcome = 'lost', message = 'the engine died' WHERE ended IS NULL",
                self._clock(),
            )
            self._rows("UPDATE trials SET state = ? WHERE state = ?", TrialState.PENDING, TrialState.RUNNING)

    def _train(self, job: str, device: str, numbers: Sequence[int]) -> None:
        self._many(
            "UPDATE trials SET state = ?, reason = '', device = ?, array = ? WHERE number = ?",
            [(TrialState.RUNNING, device, job, number) for number in numbers],
        )
        for number in numbers:
            self._waiting.pop(number, None)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _many(self, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self.transaction(), translated(self.directory):
            self._connection.executemany(sql, rows)
