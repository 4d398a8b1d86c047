"""A journal written call by call, for tests and benchmarks of what reads it: no study runs."""

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from shoal.core.activity import Activity
from shoal.core.array import Array
from shoal.core.cause import Cause
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.event import NOT_TRIAL_FAILURES, Ended, Outcome, Proven, TurnStats
from shoal.core.job import Job, Purpose
from shoal.core.rows import DeviceRow, Intervention, Kill, Proposal, Quantum, ReportRow, Row, Telemetry
from shoal.core.trial import Decision, Report, Trial, TrialGroup, TrialState
from shoal.journal.lock import WriterLock
from shoal.journal.statistics import StudyStatistics
from shoal.journal.writer import Journal
from shoal.study.checks import Checks
from shoal.study.devices import device_row
from shoal.study.improvement import BestTracker
from shoal.study.job_events import dropped
from shoal.study.jobs import RunningJobs, ended_with_engine
from shoal.study.lifecycle import Lifecycle
from shoal.study.trials import TrialRecord, TrialTable

__all__ = ["RecordedJournal"]


class RecordedJournal(Journal):
    """A journal with the parts of a study's state that write it, and a method for each event of a study."""

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: WriterLock, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, connection, lock, clock)
        self.checks_made, self.running = Checks(), RunningJobs()
        self.checks_made.restore(self.verdicts(), StudyStatistics(self).checked())
        self._devices: dict[str, DeviceRow] = {}
        self._usage: dict[str, tuple[int | None, int | None]] = {}
        self._seq = self.last_seq()
        self.table = TrialTable(self.objectives, self.spec.bounds, self.spec.of_best)
        for record in self._records():
            self.table.move(record, record.state, record.reason)
        self.table.take_rows()
        self._follow_best()

    def record_proposal(self, free: int, groups: Sequence[TrialGroup]) -> None:
        if not groups:
            return
        for group in groups:
            for trial in group.trials:
                record = self.table.get(trial.number) or TrialRecord(trial, 0, trial.start)
                record.target = group.budget.epochs
                self.table.move(record, TrialState.PENDING)
        self._write(Proposal(free, tuple(groups), self._next(), self.clock()))

    def record_added_trial(self, trial: Trial, target: int) -> None:
        self.table.add(TrialRecord(trial, target, trial.start))
        self._write()

    def record_reports(self, job: str, reports: Iterable[Report]) -> list[Report]:
        new = [report for report in reports if self.table.reported(report)]
        now = self.clock()
        self._write(*(ReportRow(self._next(), now, job, x, self.best_tracker.after(x.trial)) for x in new))
        return new

    def record_decisions(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if not self.table[decision.trial].state.final:
                self.table.move(self.table[decision.trial], decision.state, decision.reason)
        self._write()

    def requeue_failed(self, numbers: Iterable[int]) -> dict[int, int]:
        failed = [record for x in sorted(numbers) if (record := self.table.get(x)) and record.has_failed]
        for record in failed:
            self.table.retry(record)
        self._write()
        return {record.number: record.epoch for record in failed}

    def record_user_stop(self, numbers: Iterable[int], reason: str) -> None:
        for number in numbers:
            self.table.move(self.table[number], TrialState.STOPPED, reason)
        self._write()

    def record_pause(self, numbers: Sequence[int], user: str) -> None:
        self.table.pause(numbers, user)
        self._write()

    def record_intervention(self, what: Intervention) -> None:
        self._write(replace(what, seq=self._next(), time=self.clock()))

    def record_waiting_reasons(self, reasons: Mapping[int, str]) -> None:
        self.table.explain({x: why for x, why in reasons.items() if self.table[x].state is TrialState.PENDING})
        self._write()

    def record_job_start(self, job: Job, device: str) -> None:
        self.running.begin(job, Device(device, "", 1), self.clock())
        if job.purpose is Purpose.TRAIN:
            self.table.begin(job.id, device, [x for x in job.members if self.table.get(x.trial.number)])
        self._write()

    def record_preemption(self, job: str, why: str) -> None:
        self.running.note(job, why)
        self._write()

    def record_kill(self, job: str, outcome: Outcome, why: str) -> None:
        self.running.kill(job, Kill(outcome, why))
        self._write()

    def record_join(self, job: str, device: str, arrays: Sequence[Array]) -> None:
        self.running.join(job, arrays)
        self.table.begin(job, device, [member for array in arrays for member in array.members])
        self._write()

    def record_reservations(self, demands: Mapping[str, Demand]) -> None:
        for job, demand in demands.items():
            self.running.reserve(self.running[job][0], demand, self.clock())
        self._write()

    def record_quantum(self, job: str, number: int, losses: TurnStats) -> None:
        self._write(Quantum(job, number, self.clock(), losses))

    def record_checks(self, found: Proven) -> None:
        self._write(*self.checks_made.add(found))

    def record_telemetry(self, usage: Mapping[str, tuple[int | None, int | None]]) -> None:
        changed = {name: used for name, used in usage.items() if self._usage.get(name) != used}
        self._usage |= changed
        self._write(*(Telemetry(self.clock(), name, *used) for name, used in changed.items()))

    def record_devices(self, cluster: Cluster) -> None:
        rows = {device.name: device_row(node, device) for node, device in cluster}
        gone = [x for x in self._devices if x not in rows]
        rows |= {x: replace(self._devices[x], healthy=False, reason="removed") for x in gone}
        self._write(*(replace(row, time=self.clock()) for x, row in rows.items() if self._devices.get(x) != row))
        self._devices = rows

    def record_job_end(
        self,
        job: str,
        outcome: str,
        message: str = "",
        *,
        failed: bool,
        activities: Mapping[Activity, float] = MappingProxyType({}),
    ) -> dict[int, int]:
        self.running.end(Ended(job, Outcome(outcome), message, activities), Outcome(outcome), self.clock())
        return self._requeue(job, None, failed=failed)

    def record_dropped_trials(
        self, job: str, trials: Iterable[int], message: str = "", *, failed: bool
    ) -> dict[int, int]:
        numbers = set(trials)
        self.running.note(job, dropped(numbers, message))
        return self._requeue(job, numbers, failed=failed)

    def record_common_failure(self, cause: Cause) -> None:
        lifecycle, earlier = Lifecycle({}), self.study.get("common_failure_trials", ())
        self.table.clear_all_failures()
        lifecycle.stop(cause, sorted({*earlier, *cause.trials}))
        self._write(*lifecycle.take_rows())

    def requeue_running(self) -> None:
        """As a resume after a kill does: all jobs have ended, and their trials wait again."""
        rows = [ended_with_engine(row, self.clock()) for row in self.jobs(running=True)]
        self.table = TrialTable(self.objectives, self.spec.bounds, self.spec.of_best)
        self.table.restore(self._records(), {row.id for row in rows if row.outcome not in NOT_TRIAL_FAILURES})
        self._follow_best()
        self.running = RunningJobs()
        self._write(*rows)

    def _follow_best(self) -> None:
        self.best_tracker = BestTracker(self.spec, self.table)
        self.best_tracker.restore([value for _, value in self.best_values()])

    def _records(self) -> list[TrialRecord]:
        seen, checkpoints = self.reported_states(), self.checkpoints()
        return [TrialRecord.of(x, seen.get(x.number, {}), checkpoints.get(x.number, "")) for x in self.trials()]

    def _requeue(self, job: str, trials: set[int] | None, *, failed: bool) -> dict[int, int]:
        left = self.table.requeue(job, trials, failed=failed)
        self._write()
        return {number: self.table[number].failures for number in sorted(left)}

    def _write(self, *rows: Row) -> None:
        self.write([*rows, *self.table.take_rows(), *self.running.take_rows()])

    def _next(self) -> int:
        self._seq += 1
        return self._seq
