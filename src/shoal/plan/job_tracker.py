"""Runtime history of each job across suspensions, and the suspended jobs."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median

from shoal.core.array import Array, FusionKey, Member, remove_members
from shoal.core.device import Device
from shoal.core.event import NOT_TRIAL_FAILURES, Ended, Outcome, Reported, TurnStats
from shoal.core.job import Job, Purpose
from shoal.plan.job_history import EarlierJob, JobHistory, restored_arrays

__all__ = ["JobTracker", "PreemptionRequest"]

SWITCH_SECONDS = 0.5
"""Assumed cost of suspending and resuming a job, until the study has measured one."""

_MIN_SECONDS = 1e-9
"""Least seconds of a quantum, so that a rate is finite."""

MAX_HELPER_FAILURES = 3
"""Failures of helpers of a key on a kind of device after which no job of the key gets another one there."""

MAX_SWITCHES = 101
"""Number of recent switches. Their median is the cost of a switch."""


@dataclass(frozen=True)
class PreemptionRequest:
    """Request that a job leaves its device: it is suspended and keeps its arrays, or ends and its trials wait again."""

    suspends: bool
    reason: str


class JobTracker:
    """The history of every running or suspended job.

    A plan changes a copy, which becomes the history of the study once the plan is applied.

    The back end and the journal treat a suspended job as ended. The job that resumes it has another id and inherits
    its history. The trials of a suspended job are `PENDING`, but are not put into new arrays. Finished trials are
    removed from the job, and a job without trials is removed.

    After the end of the engine, `restore` is given the jobs that were suspended or running. The suspended ones are
    suspended again; the others pass their history on to a new job of the same trials.

    A quantum holds the losses that a job measured in one turn. A turn ends when `end_turn` is called or when the job
    leaves its device. Losses between the end of a turn and the departure that follows count in its next turn.
    """

    def __init__(self) -> None:
        self.changes = 0
        """Number of changes: preemption requests, departures, dissolved jobs, and jobs that have become preemptible."""
        self.leaving: dict[str, PreemptionRequest] = {}
        self.switch_seconds = SWITCH_SECONDS
        """Seconds that suspending and resuming a job cost: request to departure, plus start to first step."""
        self.running: dict[str, JobHistory] = {}
        self.suspended: dict[str, tuple[Job, JobHistory]] = {}
        self.interrupted: dict[frozenset[int], EarlierJob] = {}
        """Running jobs of an earlier engine, by their trials, until a new job of these trials starts."""
        self.best: float | None = None
        """Lowest loss of all turns; None before the first."""
        self._earlier: list[EarlierJob] = []  # suspended jobs of an earlier engine whose trials do not wait yet
        self._helper_failures = Counter[tuple[FusionKey, str]]()
        self._measured: list[tuple[str, int, TurnStats]] = []
        self._switches: list[float] = []

    def copy(self) -> "JobTracker":
        """Return a history that can be changed without changing this one."""
        copied = copy(self)
        copied.leaving, copied.running, copied.suspended = dict(self.leaving), dict(self.running), dict(self.suspended)
        copied.interrupted, copied._measured = dict(self.interrupted), list(self._measured)
        copied._earlier, copied._helper_failures = list(self._earlier), self._helper_failures.copy()
        return copied

    def restore(self, jobs: Iterable[EarlierJob]) -> None:
        """Restore the jobs of an earlier engine that were suspended or running."""
        for job in jobs:
            if job.suspended:
                self._earlier.append(job)
            elif job.quanta:
                self.interrupted[frozenset[int]().union(*job.arrays)] = job

    def take_quanta(self) -> list[tuple[str, int, TurnStats]]:
        """Return the job, the number and the losses of each turn that has ended since the last call."""
        measured, self._measured = self._measured, []
        return measured

    def refresh_suspended(self, waiting: Callable[[int], tuple[Member, FusionKey] | None], now: float) -> None:
        """Give suspended jobs their present members; a job without members is removed.

        `waiting` returns the member of a trial that waits, with its key; None if it does not wait.
        """
        for earlier in self._earlier[:]:
            self._suspend_earlier(earlier, waiting, now)
        for name, (job, history) in list(self.suspended.items()):
            arrays = (
                replace(x, members=tuple([found[0] for m in x.members if (found := waiting(m.trial.number))]))
                for x in job.arrays
            )
            job = replace(job, arrays=tuple(array for array in arrays if array.members))
            del self.suspended[name]
            if job.arrays:
                self.suspended[name] = (job, history)
            else:
                self.changes += 1

    def begin(self, job: Job, device: str, share: float | None, now: float, arrived: float | None = None) -> None:
        """Record that a job starts on a device; its first trial has waited since `arrived`, or arrives now."""
        if job.resumes:
            _, history = self.suspended.pop(job.resumes)
        else:
            trials = frozenset(member.trial.number for member in job.members)
            earlier = self.interrupted.pop(trials, None) if job.purpose is Purpose.TRAIN else None
            began = now if arrived is None else arrived
            history = JobHistory(began, now, device) if earlier is None else JobHistory.restored(earlier, now)
        self.running[job.id] = replace(
            history, since=now, turn_since=None, device=device, share=share, has_reported=False, may_grow=True
        )

    def register_running(
        self, running: Iterable[tuple[Job, Device]], now: float, arrived: Callable[[Sequence[Array]], float]
    ) -> None:
        """Register running jobs; one that is not registered begins now, and its first trial has waited since
        `arrived`.
        """
        for job, device in running:
            if job.id not in self.running:
                self.begin(job, device.name, None, now, arrived(job.arrays))

    def set_share(self, job: str, share: float | None) -> None:
        """Record the new share of a running job."""
        self.running[job] = replace(self.running[job], share=share)

    def request_preemption(self, job: str, leave: PreemptionRequest, now: float) -> None:
        """Record a request that a job leaves its device."""
        self.leaving[job] = leave
        self.running[job] = replace(self.running[job], preemption_requested_at=now)
        self.changes += 1

    def on_report(self, event: Reported, now: float) -> None:
        """Record the losses of a report. The first report after a start also ends the measurement of a switch."""
        history = self.running.get(event.job)
        if history is None:
            return
        if (losses := event.losses) is not None:
            turn = losses if history.current_turn is None else history.current_turn.followed_by(losses)
            if not history.has_reported and history.switch is not None:
                resume_seconds = max(0.0, now - history.since - losses.seconds)
                self._switches = [*self._switches, history.switch + resume_seconds][-MAX_SWITCHES:]
                self.switch_seconds = median(self._switches)
                history = replace(history, switch=None)
            history = replace(history, current_turn=turn)
        self.changes += not history.has_reported  # the job is preemptible from now on
        self.running[event.job] = replace(history, has_reported=True)

    def end_helper(self, helper: Job, device: Device, outcome: Outcome) -> None:
        """Record that a helper has ended unasked, so that jobs do not get one after the other in vain; one that has
        finished could not take part, and its leader gets no other.
        """
        leader = self.running.get(helper.assists)
        if outcome not in NOT_TRIAL_FAILURES:
            self._helper_failures[helper.arrays[0].key, device.kind] += 1
        elif outcome is Outcome.FINISHED and leader is not None:
            self.running[helper.assists] = replace(leader, may_grow=False)

    def refuse_teams(self, key: FusionKey, kind: str) -> None:
        """Give jobs of a key one device of a kind from now on."""
        self._helper_failures[key, kind] = MAX_HELPER_FAILURES
        self.changes += 1

    def may_have_team(self, key: FusionKey, kind: str) -> bool:
        """Return whether jobs of a key may get helpers on a kind of device."""
        return self._helper_failures[key, kind] < MAX_HELPER_FAILURES

    def end_turn(self, job: str, now: float) -> None:
        """End the turn of a running job and begin another; a turn without a loss continues."""
        history = self.running[job]
        if (losses := history.current_turn) is not None:
            self.running[job] = replace(self._with_quantum(job, history, losses, now), turn_since=now)

    def outcome(self, ended: Ended) -> Outcome:
        """Return the outcome of a job: a job that stopped on a request to suspend is SUSPENDED."""
        leave = self.leaving.get(ended.job)
        suspended = leave is not None and leave.suspends
        return Outcome.SUSPENDED if suspended and ended.outcome is Outcome.STOPPED else ended.outcome

    def end(self, job: Job, outcome: Outcome, unfinished: Collection[int], now: float) -> None:
        """Record that a job has left its device, with the outcome of `outcome` and the trials below their targets."""
        history = self.running.pop(job.id, None)
        self.leaving.pop(job.id, None)
        self.changes += 1
        if history is None or outcome is not Outcome.SUSPENDED:
            return
        losses = history.current_turn
        if losses is not None and history.turn_since != history.preemption_requested_at:
            history = self._with_quantum(job.id, history, losses, now)
        history = replace(
            history,
            ran=history.ran + now - history.since,
            preemptions=history.preemptions + 1,
            switch=now - history.preemption_requested_at,
            since=now,
            share=None,
        )
        done = {member.trial.number for member in job.members}.difference(unfinished)
        self.suspended[job.id] = (replace(job, arrays=remove_members(job.arrays, done)), history)

    def dissolve(self, job: str) -> None:
        """Remove a suspended job; its trials wait for another job."""
        del self.suspended[job]
        self.changes += 1

    def _suspend_earlier(
        self, job: EarlierJob, waiting: Callable[[int], tuple[Member, FusionKey] | None], now: float
    ) -> None:
        """Suspend a restored job with those of its trials that wait, once there are any."""
        members = [[found for number in sorted(each) if (found := waiting(number))] for each in job.arrays]
        if any(members):
            self._earlier.remove(job)
            arrays = tuple(array for each in members for array in restored_arrays(each))
            self.suspended[job.id] = Job(job.id, arrays), JobHistory.restored(job, now)
            self.changes += 1

    def _with_quantum(self, job: str, history: JobHistory, losses: TurnStats, now: float) -> JobHistory:
        """Return the history of a job with its turn ended, and note the losses of the turn."""
        started = history.since if history.turn_since is None else history.turn_since
        # Arrays of one job may report the same seconds, and a program that was killed reports none.
        elapsed = max(now - started, _MIN_SECONDS)
        quantum = replace(losses, seconds=min(losses.seconds or elapsed, elapsed))
        self._measured.append((job, len(history.quanta), quantum))
        if isfinite(losses.lowest):
            self.best = losses.lowest if self.best is None else min(self.best, losses.lowest)
        return replace(history, quanta=(*history.quanta, quantum), current_turn=None)
