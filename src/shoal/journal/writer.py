"""Writing a journal: what the engine records, before it acts on it."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shoal.core.array import Array
from shoal.core.cause import Cause
from shoal.core.command import Intervened
from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.event import BLAMELESS, Outcome
from shoal.core.job import Job, Purpose
from shoal.core.trial import Decision, Report, Trial, TrialGroup, TrialState
from shoal.journal.codec import encode, storable
from shoal.journal.lock import WriterLock
from shoal.journal.locked import LockedJournal
from shoal.journal.record import record
from shoal.journal.schema import translated
from shoal.sources import Edit, followed, sources

__all__ = ["Journal"]

_FINAL = "({})".format(", ".join(f"'{state}'" for state in TrialState if state.final))

_NEW = (
    "INSERT INTO trials (number, config, seed, data_seed, origin, start, epoch, state, target) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_AGAIN = "state = excluded.state, target = excluded.target, reason = ''"


class Journal(LockedJournal):
    """What the engine records of a study.

    Each method is a transaction of its own; those called inside `with journal.transaction():` are one together.

    Args:
        directory: of the study.
        connection: to its journal.
        lock: held on it.
        clock: seconds since 1970.
    """

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: WriterLock, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, connection, lock, clock)
        self._devices: dict[str, tuple[object, ...]] = {}  # as last recorded by this process
        self._seq: int
        ((self._seq,),) = self.tables.rows(
            "SELECT coalesce(max(seq), 0) FROM "
            "(SELECT seq FROM asks UNION ALL SELECT seq FROM reports UNION ALL SELECT seq FROM interventions)"
        )

    def edited(self, edits: Sequence[Edit]) -> None:
        """The study goes on although files of its task have changed: what they are now counts from here.

        `study["edits"]` keeps each time: which files, what changed, and the trials that had not ended.
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
            project = self.study.get("project")
            self.put("sources", sources(followed(files, Path(project)) if project else files))

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
        rows = [_new(trial, group.budget.epochs) for group in groups for trial in group.trials]
        with self.transaction():
            self.tables.rows(
                "INSERT INTO asks (seq, time, free, proposed) VALUES (?, ?, ?, ?)",
                self._next(),
                self._clock(),
                free,
                json.dumps(proposed),
            )
            self._many(f"{_NEW} ON CONFLICT (number) DO UPDATE SET {_AGAIN}", rows)

    def trial_added(self, trial: Trial, target: int) -> None:
        """A user has added a trial, which waits.

        Args:
            trial: a new one.
            target: epochs up to which it is to be trained.
        """
        self.tables.rows(_NEW, *_new(trial, target))

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
            return record(self.tables.connection, self._next, self._clock(), job, list(reports), self.objectives)

    def decided(self, decisions: Iterable[Decision]) -> None:
        """The algorithm has ended trials; one whose state is final already keeps it."""
        self._many(
            f"UPDATE trials SET state = ?, reason = ? WHERE number = ? AND state NOT IN {_FINAL}",
            [(decision.state, storable(decision.reason), decision.trial) for decision in decisions],
        )

    def retry(self, numbers: Iterable[int]) -> dict[int, int]:
        """Trials that failed wait again, their failures forgotten; those that did not fail are left alone.

        That an algorithm is told no more of them follows from the intervention; see `retried`.

        Args:
            numbers: of the trials.

        Returns:
            Number of each trial that waits again -> epochs that it had reported before it failed.
        """
        rows = self.tables.rows(
            "SELECT number, coalesce((SELECT max(epoch) FROM reports WHERE trial = number AND state <> ?1), start) "
            "FROM trials WHERE state = ?1 AND number IN (SELECT value FROM json_each(?2)) ORDER BY number",
            TrialState.FAILED,
            json.dumps(sorted(numbers)),
        )
        epochs = dict(rows)
        self._many(
            "UPDATE trials SET state = ?, reason = '', failures = 0, epoch = ? WHERE number = ?",
            [(TrialState.PENDING, epoch, number) for number, epoch in epochs.items()],
        )
        return epochs

    def overruled(self, numbers: Iterable[int], reason: str) -> None:
        """Trials are STOPPED, whatever they were, and not by the algorithm.

        Args:
            numbers: of the trials.
            reason: why.
        """
        self._many(
            "UPDATE trials SET state = ?, reason = ? WHERE number = ?",
            [(TrialState.STOPPED, storable(reason), number) for number in numbers],
        )

    def intervened(self, what: Intervened) -> None:
        """The request of a user is carried out or refused."""
        lists = map(json.dumps, (what.trials, what.devices, [storable(line) for line in what.refused]))
        self.tables.rows(
            "INSERT INTO interventions (seq, time, request, verb, text, trials, devices, refused) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(self._next(), self._clock(), what.request, what.verb, storable(what.text), *lists),
        )

    def waiting_reasons(self, reasons: Mapping[int, str]) -> None:
        """Why trials wait; of those that do not, nothing is written.

        Args:
            reasons: trial number to reason.
        """
        rows = [(storable(reason), trial) for trial, reason in reasons.items()]
        self._many("UPDATE trials SET reason = ? WHERE number = ? AND state = 'pending'", rows)

    def job_started(self, job: Job, device: str) -> None:
        """A job is about to start on a device; the members of a training job are now RUNNING."""
        numbers = [member.trial.number for member in job.members]
        now = self._clock()
        with self.transaction():
            self.tables.rows(
                "INSERT INTO jobs (id, purpose, device, trials, started, message, keys) VALUES (?, ?, ?, ?, ?, ?, ?)",
                job.id,
                job.purpose,
                device,
                json.dumps(numbers),
                now,
                f"goes on with {job.resumes}" if job.resumes else "",
                json.dumps(_by_key(job.arrays) if job.purpose is Purpose.TRAIN else {}),
            )
            self._promise(now, {job.id: job.demand})
            if job.purpose is Purpose.TRAIN:
                self._train(job.id, device, numbers)

    def leaving(self, job: str, why: str) -> None:
        """A job is about to be asked to leave its device."""
        with self.transaction():
            self._add(job, why)

    def killing(self, job: str, outcome: Outcome, why: str) -> None:
        """A job is about to be killed, and will have ended so: at the latest in `requeue_running`."""
        self.tables.rows("UPDATE jobs SET killed = ? WHERE id = ?", storable(f"{outcome}: {why}"), job)

    def _add(self, job: str, message: str) -> None:
        """One more line of what is to be said of a job."""
        sql = "UPDATE jobs SET message = trim(message || char(10) || ?, char(10)) WHERE id = ?"
        self.tables.rows(sql, storable(message), job)

    def joined(self, job: str, device: str, arrays: Sequence[Array]) -> None:
        """The members of arrays are about to join a running job; they are now RUNNING."""
        numbers = [member.trial.number for array in arrays for member in array.members]
        rows = [(job, array.key.steps, member.trial.number) for array in arrays for member in array.members]
        with self.transaction():
            self._many("INSERT INTO joins VALUES (?, ?, ?)", rows)
            self._train(job, device, numbers)

    def promised(self, demands: Mapping[str, Demand]) -> None:
        """Jobs are promised this of their devices from now on.

        Args:
            demands: id of each job -> what it is promised; a memory or cores of 0 say that they are not known.
        """
        if demands:
            self._promise(self._clock(), demands)

    def devices_are(self, cluster: Cluster) -> None:
        """These are the devices from now on; only what is another than before is written.

        Args:
            cluster: all of them. Those that were there and are none of them have been removed.
        """
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
        self._many(
            "INSERT INTO devices VALUES (?, (SELECT max(number) FROM runs), ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, *row) for row in changed],
        )
        self._devices = rows | gone

    def job_ended(self, job: str, outcome: str, message: str = "", *, failed: bool) -> dict[int, int]:
        """A job is over: its trials that are still RUNNING wait again.

        Args:
            job: its id.
            outcome: how it ended.
            message: what the back end said of it; "" leaves what was noted of the job before.
            failed: count this as a failure of the trials that wait again.

        Returns:
            These trials' numbers, each with its count of failures.
        """
        with self.transaction():
            self._add(job, message)
            self.tables.rows("UPDATE jobs SET ended = ?, outcome = ? WHERE id = ?", self._clock(), outcome, job)
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

    def dropped(self, job: str, trials: Iterable[int], message: str = "", *, failed: bool) -> dict[int, int]:
        """A job trains some of its trials no more: those that are still RUNNING there wait again.

        Args:
            job: its id.
            trials: their numbers.
            message: why; it is kept with the job.
            failed: as for `job_ended`.

        Returns:
            As of `job_ended`.
        """
        numbers = sorted(trials)
        with self.transaction():
            self._add(job, f"dropped trials {', '.join(map(str, numbers))}: {message}")
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

    def stopped(self, cause: Cause) -> None:
        """The study ends, since its first trials fail alike: that counts not against those that are still open.

        `study["tried"]` keeps the trials of all such ends, which others come before when it goes on.

        Args:
            cause: what they failed of.
        """
        with self.transaction():
            self.tables.rows(f"UPDATE trials SET failures = 0 WHERE state NOT IN {_FINAL}")
            self.put("stopped", {"text": cause.text, "trials": cause.trials, "log": cause.log})
            self.put("tried", sorted({*self.study.get("tried", ()), *cause.trials}))

    def requeue_running(self) -> None:
        """Nothing runs any more, since the process that ran it is gone: RUNNING trials wait, open jobs are ended.

        A job that was about to be killed has ended as that would have had it: trials of one that hung count a failure.
        """
        killed = self.tables.rows("SELECT id, killed FROM jobs WHERE ended IS NULL AND killed <> ''")
        with self.transaction():
            for job, text in killed:
                outcome, _, why = text.partition(": ")
                self.job_ended(job, outcome, why, failed=outcome not in BLAMELESS)
            self.tables.rows(
                "UPDATE jobs SET ended = ?, outcome = ?, message = trim(message || char(10) || ?, char(10)) "
                "WHERE ended IS NULL",
                self._clock(),
                Outcome.ORPHANED,
                "the engine died",
            )
            self.tables.rows("UPDATE trials SET state = ? WHERE state = ?", TrialState.PENDING, TrialState.RUNNING)

    def _promise(self, now: float, demands: Mapping[str, Demand | None]) -> None:
        self._many(
            "INSERT INTO promises (job, time, compute, memory, cores) VALUES (?, ?, ?, ?, ?)",
            [
                (job, now, None if demand is None else demand.compute, *_known(demand))
                for job, demand in demands.items()
            ],
        )

    def _train(self, job: str, device: str, numbers: Sequence[int]) -> None:
        self._many(
            "UPDATE trials SET state = ?, reason = '', device = ?, job = ? WHERE number = ?",
            [(TrialState.RUNNING, device, job, number) for number in numbers],
        )

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _undone(self) -> None:
        self._devices = {}


def _new(trial: Trial, target: int) -> tuple[object, ...]:
    """The row of a trial that waits and has reported nothing."""
    config = encode(trial.config, f"the config of trial {trial.number}")
    origin = None if trial.origin is None else trial.origin.trial
    start = trial.start
    return trial.number, config, trial.seed, trial.data_seed, origin, start, start, TrialState.PENDING, target


def _known(demand: Demand | None) -> tuple[int | None, float | None]:
    """The memory and cores of a demand, as far as they are known: 0 says that they are not."""
    return (None, None) if demand is None else (demand.memory or None, demand.cores or None)


def _by_key(arrays: Iterable[Array]) -> dict[str, list[int]]:
    """What arrays are, and the numbers of the trials of each."""
    found: dict[str, list[int]] = {}
    for array in arrays:
        found.setdefault(array.key.steps, []).extend(member.trial.number for member in array.members)
    return found
