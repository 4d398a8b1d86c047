"""Writing of a journal. The engine records each change before it acts on it."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import reduce
from pathlib import Path
from types import MappingProxyType

from shoal.core.activity import Activity
from shoal.core.array import Array
from shoal.core.cause import Cause
from shoal.core.command import Intervened
from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.event import NOT_TRIAL_FAILURES, Outcome, Proven, TurnStats
from shoal.core.job import Job, Purpose
from shoal.core.trial import Decision, Report, Trial, TrialGroup, TrialState
from shoal.journal.codec import encode, storable
from shoal.journal.lock import WriterLock
from shoal.journal.locked import LockedJournal
from shoal.journal.record import record
from shoal.journal.rows import REFUSED, CheckRow, Verdict
from shoal.journal.schema import translate_errors
from shoal.journal.view import JournalTables
from shoal.sources import Edit, imported_files, sources

__all__ = ["Journal"]

_FINAL = "({})".format(", ".join(f"'{state}'" for state in TrialState if state.final))

_INSERT_TRIAL = (
    "INSERT INTO trials (number, config, seed, data_seed, origin, start, epoch, state, target) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_REQUEUE_TRIAL = "state = excluded.state, target = excluded.target, reason = ''"


class Journal(LockedJournal):
    """A study's journal, with a method for each record of its engine.

    Each method is one transaction; calls inside `with journal.transaction():` share one transaction.

    Its arguments are those of `LockedJournal`.
    """

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: WriterLock, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, connection, lock, clock)
        self._devices: dict[str, tuple[object, ...]] = {}  # rows as last recorded by this process
        self._usage: dict[str, tuple[int | None, int | None]] = {}  # of devices, as last recorded by this process
        self._seq: int
        ((self._seq,),) = self.tables.rows(
            "SELECT coalesce(max(seq), 0) FROM "
            "(SELECT seq FROM proposals UNION ALL SELECT seq FROM reports UNION ALL SELECT seq FROM interventions)"
        )

    def record_edits(self, edits: Sequence[Edit]) -> None:
        """Record that the study continues with edited source files of its task, whose contents become the reference.

        `study["edits"]` gets an entry with the time, the changes by file, and the trials that had not ended.
        """
        trials = self.trials()
        open_ = [row.number for row in trials if not row.state.final]
        entry = {
            "time": self._clock(),
            "files": {edit.path: edit.text for edit in edits},
            "open": open_,
            "next": sum(not row.trial.is_added for row in trials),
        }
        with self.transaction():
            self.put("edits", [*self.study.get("edits", []), entry])
            files = [Path(path) for path in self.study["sources"]]
            project = self.spec.project
            self.put("sources", sources(imported_files(files, Path(project)) if project else files))

    def record_proposal(self, free: int, groups: Sequence[TrialGroup]) -> None:
        """Record groups that the algorithm proposed; their new or promoted trials wait.

        An empty proposal is not recorded, since it does not change the algorithm.
        """
        if not groups:
            return
        proposed = [
            {"name": group.name, "epochs": group.budget.epochs, "trials": [trial.number for trial in group.trials]}
            for group in groups
        ]
        rows = [_trial_values(trial, group.budget.epochs) for group in groups for trial in group.trials]
        with self.transaction():
            self.tables.rows(
                "INSERT INTO proposals (seq, time, free, proposed) VALUES (?, ?, ?, ?)",
                self._next_seq(),
                self._clock(),
                free,
                json.dumps(proposed),
            )
            self._execute_many(f"{_INSERT_TRIAL} ON CONFLICT (number) DO UPDATE SET {_REQUEUE_TRIAL}", rows)

    def record_added_trial(self, trial: Trial, target: int) -> None:
        """Record a trial that a user has added; it waits."""
        self.tables.rows(_INSERT_TRIAL, *_trial_values(trial, target))

    def record_reports(self, job: str, reports: Iterable[Report]) -> list[Report]:
        """Record reports of a job, without repetitions.

        After a resume a worker may repeat recorded epochs. Such a report is ignored, unless it says for the first time
        that the trial is PAUSED or FAILED there. A report of a trial in a final state is ignored.

        Args:
            job: Id of the job; "" if the engine itself fails a trial.

        Returns:
            The recorded reports, which the algorithm observes in this order.
        """
        with self.transaction(), translate_errors(self.directory):
            return record(self.tables.connection, self._next_seq, self._clock(), job, list(reports), self.objectives)

    def record_decisions(self, decisions: Iterable[Decision]) -> None:
        """Record decisions of the algorithm; a trial in a final state keeps it."""
        self._execute_many(
            f"UPDATE trials SET state = ?, reason = ? WHERE number = ? AND state NOT IN {_FINAL}",
            [(decision.state, storable(decision.reason), decision.trial) for decision in decisions],
        )

    def requeue_failed(self, numbers: Iterable[int]) -> dict[int, int]:
        """Make failed trials wait again with their failures cleared; other trials do not change.

        A separate intervention records that the algorithm does not observe them any more; see `retried`.

        Returns:
            Number of each trial that waits again -> epochs reported before it failed.
        """
        rows = self.tables.rows(
            "SELECT number, coalesce((SELECT max(epoch) FROM reports WHERE trial = number AND state <> ?), start) "
            "FROM trials WHERE state = ? AND number IN (SELECT value FROM json_each(?)) ORDER BY number",
            TrialState.FAILED,
            TrialState.FAILED,
            json.dumps(sorted(numbers)),
        )
        epochs = dict(rows)
        self._execute_many(
            "UPDATE trials SET state = ?, reason = '', failures = 0, epoch = ? WHERE number = ?",
            [(TrialState.PENDING, epoch, number) for number, epoch in epochs.items()],
        )
        return epochs

    def record_user_stop(self, numbers: Iterable[int], reason: str) -> None:
        """Record trials as STOPPED by a user, in any state."""
        self._execute_many(
            "UPDATE trials SET state = ?, reason = ? WHERE number = ?",
            [(TrialState.STOPPED, storable(reason), number) for number in numbers],
        )

    def record_intervention(self, what: Intervened) -> None:
        """Record the result of a user's request."""
        lists = map(json.dumps, (what.trials, what.devices, [storable(line) for line in what.refused]))
        self.tables.rows(
            "INSERT INTO interventions (seq, time, request, verb, text, trials, devices, refused) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(self._next_seq(), self._clock(), what.request, what.verb, storable(what.text), *lists),
        )

    def record_waiting_reasons(self, reasons: Mapping[int, str]) -> None:
        """Record waiting reasons; trials that do not wait are left out."""
        rows = [(storable(reason), trial) for trial, reason in reasons.items()]
        self._execute_many("UPDATE trials SET reason = ? WHERE number = ? AND state = 'pending'", rows)

    def record_job_start(self, job: Job, device: str) -> None:
        """Record a job that is about to start on a device; the members of a training job become RUNNING."""
        numbers = [member.trial.number for member in job.members]
        now = self._clock()
        with self.transaction():
            self.tables.rows(
                "INSERT INTO jobs (id, purpose, device, trials, started, message, keys, resumes, assists) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                job.id,
                job.purpose,
                device,
                json.dumps(numbers),
                now,
                f"goes on with {job.resumes}" if job.resumes else "",
                json.dumps(_trials_by_key(job.arrays) if job.purpose is Purpose.TRAIN else {}),
                job.resumes,
                job.assists,
            )
            self._execute_many(_INSERT_RESERVATION, _reservation_rows(now, {job.id: job.demand}))
            if job.purpose is Purpose.TRAIN:
                _mark_running(self.tables, job.id, device, numbers)

    def record_preemption(self, job: str, why: str) -> None:
        """Record the reason why a job will be asked to leave its device."""
        with self.transaction():
            _append_message(self.tables, job, why)

    def record_kill(self, job: str, outcome: Outcome, why: str) -> None:
        """Record the outcome of a job before its kill; `requeue_running` applies it if this process dies first."""
        self.tables.rows("UPDATE jobs SET kill_reason = ? WHERE id = ?", storable(f"{outcome}: {why}"), job)

    def record_join(self, job: str, device: str, arrays: Sequence[Array]) -> None:
        """Record arrays whose members are about to join a running job; the members become RUNNING."""
        numbers = [member.trial.number for array in arrays for member in array.members]
        rows = [(job, array.key.steps, member.trial.number) for array in arrays for member in array.members]
        with self.transaction():
            self._execute_many("INSERT INTO joins VALUES (?, ?, ?)", rows)
            _mark_running(self.tables, job, device, numbers)

    def record_reservations(self, demands: Mapping[str, Demand]) -> None:
        """Record new reservations of jobs, where a memory or cores of 0 mean unknown."""
        if demands:
            self._execute_many(_INSERT_RESERVATION, _reservation_rows(self._clock(), demands))

    def record_quantum(self, job: str, number: int, losses: TurnStats) -> None:
        """Record the losses of a turn of a job."""
        self.tables.rows(
            "INSERT INTO quanta VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            job,
            number,
            self._clock(),
            *astuple(losses),
        )

    def record_checks(self, found: Proven) -> None:
        """Record comparisons of trials of an array with plain PyTorch, or why they train in it; of trials that have no
        row yet, that they were in an array.
        """
        key, members = found.key.steps, len(found.trials)
        rows = [CheckRow(found.job, key, x.trial, members, x.epoch, x.step, x.what, x.difference) for x in found.checks]
        if found.refusal:
            reason = storable(found.refusal)
            rows += [
                CheckRow(found.job, key, trial, members, epoch, found.step, REFUSED, None, reason)
                for trial, epoch in found.trials.items()
            ]
        sql = "SELECT DISTINCT trial FROM checks WHERE key = ? AND trial IN (SELECT value FROM json_each(?))"
        known = {trial for (trial,) in self.tables.rows(sql, key, json.dumps([*found.trials]))}
        new = found.trials.keys() - known - {row.trial for row in rows}
        rows += [CheckRow(found.job, key, trial, members, found.trials[trial], 0, "") for trial in sorted(new)]
        (before,) = self.verdicts(key) or [Verdict(key)]
        verdict = reduce(Verdict.followed_by, rows, before)
        with self.transaction():
            self._execute_many("INSERT INTO checks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", map(astuple, rows))
            self.tables.rows(
                "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(key, json.dumps(verdict.trials), *astuple(verdict)[2:]),
            )

    def record_telemetry(self, usage: Mapping[str, tuple[int | None, int | None]]) -> None:
        """Record changes in the use of GPUs: name of a device -> its utilisation in percent and bytes in use; None if
        unknown.
        """
        now = self._clock()
        changed = {name: used for name, used in usage.items() if self._usage.get(name) != used}
        self._execute_many(
            "INSERT INTO telemetry VALUES (?, ?, ?, ?)", [(now, x, *used) for x, used in changed.items()]
        )
        self._usage |= changed

    def record_devices(self, cluster: Cluster) -> None:
        """Record changes of the present devices; earlier ones that the cluster lacks are recorded as removed."""
        rows: dict[str, tuple[object, ...]] = {
            device.name: (
                device.name,
                node.name,
                node.cores,
                device.kind,
                device.memory,
                device.cores,
                device.compute,
                device.healthy,
                "" if device.healthy else device.note,
            )
            for node, device in cluster
        }
        gone = {name: (*row[:-2], False, "removed") for name, row in self._devices.items() if name not in rows}
        changed = [row for name, row in (rows | gone).items() if self._devices.get(name) != row]
        now = self._clock()
        self._execute_many(
            "INSERT INTO devices VALUES (?, (SELECT max(number) FROM runs), ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, *row) for row in changed],
        )
        self._devices = rows | gone

    def record_job_end(
        self,
        job: str,
        outcome: str,
        message: str = "",
        *,
        failed: bool,
        activities: Mapping[Activity, float] = MappingProxyType({}),
    ) -> dict[int, int]:
        """Record the end of a job; its RUNNING trials wait again, and are returned with their counts of failures."""
        with self.transaction():
            _append_message(self.tables, job, message)
            self.tables.rows(
                "UPDATE jobs SET ended = ?, outcome = ?, activities = ? WHERE id = ?",
                self._clock(),
                outcome,
                json.dumps({activity: round(seconds, 6) for activity, seconds in activities.items()}),
                job,
            )
            return dict(
                self.tables.rows(
                    "UPDATE trials SET state = ?, failures = failures + ? WHERE job = ? AND state = ? "
                    "RETURNING number, failures",
                    TrialState.PENDING,
                    int(failed),
                    job,
                    TrialState.RUNNING,
                )
            )

    def record_dropped_trials(
        self, job: str, trials: Iterable[int], message: str = "", *, failed: bool
    ) -> dict[int, int]:
        """Record trials that a job does not train any more; RUNNING ones wait again, returned as of
        `record_job_end`.
        """
        numbers = sorted(trials)
        with self.transaction():
            _append_message(self.tables, job, f"dropped trials {', '.join(map(str, numbers))}: {message}")
            return dict(
                self.tables.rows(
                    "UPDATE trials SET state = ?, failures = failures + ? WHERE job = ? AND state = ? "
                    "AND number IN (SELECT value FROM json_each(?)) RETURNING number, failures",
                    TrialState.PENDING,
                    int(failed),
                    job,
                    TrialState.RUNNING,
                    json.dumps(numbers),
                )
            )

    def record_common_failure(self, cause: Cause) -> None:
        """Record that the study ends because its first trials failed with one cause, and clear failures of open trials.

        `study["common_failure_trials"]` keeps the trials of all such ends; on resume they wait behind the others.
        """
        with self.transaction():
            self.tables.rows(f"UPDATE trials SET failures = 0 WHERE state NOT IN {_FINAL}")
            self.put("stopped", {"text": cause.text, "trials": cause.trials, "log": cause.log})
            key = "common_failure_trials"
            self.put(key, sorted({*self.study.get(key, ()), *cause.trials}))

    def requeue_running(self) -> None:
        """Record that all jobs have ended with their engine: RUNNING trials wait again, open jobs end as ORPHANED.

        A job that was about to be killed gets the outcome of the kill, so that trials of a hung job count a failure.
        """
        killed = self.tables.rows("SELECT id, kill_reason FROM jobs WHERE ended IS NULL AND kill_reason <> ''")
        with self.transaction():
            for job, text in killed:
                outcome, _, why = text.partition(": ")
                self.record_job_end(job, outcome, why, failed=outcome not in NOT_TRIAL_FAILURES)
            self.tables.rows(
                "UPDATE jobs SET ended = ?, outcome = ?, message = trim(message || char(10) || ?, char(10)) "
                "WHERE ended IS NULL",
                self._clock(),
                Outcome.ORPHANED,
                "the engine died",
            )
            self.tables.rows("UPDATE trials SET state = ? WHERE state = ?", TrialState.PENDING, TrialState.RUNNING)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _discard_caches(self) -> None:
        self._devices, self._usage = {}, {}


def _append_message(tables: JournalTables, job: str, message: str) -> None:
    sql = "UPDATE jobs SET message = trim(message || char(10) || ?, char(10)) WHERE id = ?"
    tables.rows(sql, storable(message), job)


def _mark_running(tables: JournalTables, job: str, device: str, numbers: Sequence[int]) -> None:
    tables.rows(
        "UPDATE trials SET state = ?, reason = '', device = ?, job = ? "
        "WHERE number IN (SELECT value FROM json_each(?))",
        *(TrialState.RUNNING, device, job, json.dumps(numbers)),
    )


def _trial_values(trial: Trial, target: int) -> tuple[object, ...]:
    """Row of a waiting trial without reports."""
    config = encode(trial.config, f"the config of trial {trial.number}")
    origin = None if trial.origin is None else trial.origin.trial
    start = trial.start
    return trial.number, config, trial.seed, trial.data_seed, origin, start, start, TrialState.PENDING, target


def _memory_and_cores(demand: Demand | None) -> tuple[int | None, float | None]:
    """Memory and cores of a demand; None if they are 0, which means unknown."""
    return (None, None) if demand is None else (demand.memory or None, demand.cores or None)


def _trials_by_key(arrays: Iterable[Array]) -> dict[str, list[int]]:
    """`FusionKey.steps` of each array -> numbers of its trials."""
    found: dict[str, list[int]] = {}
    for array in arrays:
        found.setdefault(array.key.steps, []).extend(member.trial.number for member in array.members)
    return found


_INSERT_RESERVATION = "INSERT INTO reservations (job, time, compute, memory, cores) VALUES (?, ?, ?, ?, ?)"


def _reservation_rows(now: float, demands: Mapping[str, Demand | None]) -> list[tuple[object, ...]]:
    return [
        (job, now, None if demand is None else demand.compute, *_memory_and_cores(demand))
        for job, demand in demands.items()
    ]
