"""Runtime history of each job across suspensions, and the suspended jobs."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Any

from shoal.core.array import Array, FusionKey, Member, remove_members
from shoal.core.command import QuantumMeasured
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.event import NOT_TRIAL_FAILURES, Ended, Outcome, Reported
from shoal.core.job import Job, Purpose
from shoal.core.trial import TrialGroup
from shoal.cost.estimate import fetching, seconds
from shoal.cost.scaling import Scaling, multi_device_scaling, shared_device_scaling
from shoal.planner.job_history import EarlierJob, JobHistory, MemberSummary, restored_arrays
from shoal.planner.partition import Profiles
from shoal.schedule.base import JobState, JobView

__all__ = ["JobTracker", "PreemptionRequest"]

SWITCH_SECONDS = 0.5
"""Assumed cost of suspending and resuming a job, until the study has measured one."""

_MIN_SECONDS = 1e-9
"""Least seconds of a quantum, so that a rate is finite."""

TRIAL_EPOCHS = 5
"""Epochs that a job must have left to be tried beside another one, or on one device more. Its start, and the epochs
that are measured, must fit."""

MAX_HELPER_FAILURES = 3
"""Failures of helpers of a key on a kind of device after which no job of the key gets another one there."""

MAX_SWITCHES = 101
"""Number of recent switches. Their median is the cost of a switch."""


@dataclass(frozen=True)
class PreemptionRequest:
    """Request that a job leaves its device: it is suspended and keeps its arrays, or ends and its trials wait again."""

    suspends: bool
    reason: str


class _ProfileEstimates:
    def __init__(self, profiles: Profiles, teams: bool) -> None:
        self._profiles = profiles
        self._teams = teams
        self.helper_failures = Counter[tuple[FusionKey, str]]()
        self._scalings: dict[object, Scaling] = {}  # one per kind of job, within one turn of planning

    def clear(self) -> None:
        self._scalings.clear()

    def critical_path(
        self,
        with_follow_up: Sequence[tuple[Array, AbstractSet[tuple[int, int]]]],
        demand: Mapping[str, Demand],
        arrays: Sequence[Array],
    ) -> float:
        """Seconds until the last training that may follow a member ends, on the kind of device that is fastest for the
        job; 0 if nothing follows or was measured. All epochs of the job are taken as equally long.
        """
        if not with_follow_up or not demand:
            return 0.0
        kind = min(demand, key=lambda kind: demand[kind].seconds)
        epoch = demand[kind].seconds / max(1, *(epochs for array in arrays for epochs in array.epochs))
        ends = [0.0]
        for array, follow_ups in with_follow_up:
            if (profile := self._profiles(array.key, kind)) is not None:
                ends += (
                    epoch * epochs_left + seconds(profile, [more]) + fetching(profile, [more])
                    for epochs_left, more in follow_ups
                )
        return max(ends)

    def scaling(
        self, demand: Mapping[str, Demand], arrays: Sequence[Array], switch_seconds: float, on_several: bool = False
    ) -> Scaling:
        """Return the scaling of a job, measured or by its demand, on the kind of device that scales worst."""
        lasts = len(arrays) == 1 and min(arrays[0].epochs, default=0) >= TRIAL_EPOCHS
        cache_key = (
            arrays[0].key if len(arrays) == 1 else None,
            tuple([(kind, d.compute) for kind, d in demand.items()]),
            lasts,
            on_several,
        )
        if cache_key in self._scalings:
            return self._scalings[cache_key]
        found: list[Scaling] = []
        for kind, each in demand.items():
            expected = _max_sharing(each)
            known = self._profiles(arrays[0].key, kind) if len(arrays) == 1 else None
            measured = None if known is None else shared_device_scaling(known, expected)
            trial = expected == 1 and lasts and known is not None
            scaling = measured or Scaling(1.0, sharing=expected, trial=trial)
            if known is not None and self._may_have_team(arrays[0].key, kind):
                scaling = multi_device_scaling(known, scaling)
                scaling = replace(scaling, grows=scaling.grows and (lasts or on_several))
            found.append(scaling)
        worst = min(found, key=lambda scaling: (scaling.sharing, -scaling.alpha), default=Scaling(1.0))
        self._scalings[cache_key] = replace(worst, resize_seconds=switch_seconds)
        return self._scalings[cache_key]

    def _may_have_team(self, key: FusionKey, kind: str) -> bool:
        return self._teams and not key.opaque and self.helper_failures[key, kind] < MAX_HELPER_FAILURES


class JobTracker:
    """Keeps the history of every running or suspended job, and builds the views of jobs for policies.

    The back end and the journal treat a suspended job as ended. The job that resumes it has another id and inherits
    its history. The trials of a suspended job are `PENDING`, but are not put into new arrays. Finished trials are
    removed from the job, and a job without trials is removed.

    After the end of the engine, `restore` is given the jobs that were suspended or running. The suspended ones are
    suspended again; the others pass their history on to a new job of the same trials.

    A quantum holds the losses that a job measured in one turn. A turn ends when `end_turn` is called or when the job
    leaves its device. Losses between the end of a turn and the departure that follows count in its next turn.
    """

    def __init__(self, profiles: Profiles = lambda key, kind: None, *, teams: bool = False) -> None:
        self.changes = 0
        """Number of changes: preemption requests, departures, dissolved jobs, and jobs that have become preemptible."""
        self.leaving: dict[str, PreemptionRequest] = {}
        self.switch_seconds = SWITCH_SECONDS
        """Seconds that suspending and resuming a job cost: request to departure, plus start to first step."""
        self._estimates = _ProfileEstimates(profiles, teams)
        self._running: dict[str, JobHistory] = {}
        self.suspended: dict[str, tuple[Job, JobHistory]] = {}
        self._earlier: list[EarlierJob] = []  # suspended jobs of an earlier engine whose trials do not wait yet
        self._interrupted: dict[frozenset[int], EarlierJob] = {}  # running jobs of an earlier engine, by their trials
        self._measured: list[QuantumMeasured] = []
        self._arrived: dict[int, float] = {}  # by number of a waiting trial that is in no job
        self._groups: dict[int, TrialGroup] = {}  # by number of the trial
        self._best: float | None = None
        self._switches: list[float] = []

    def restore(self, jobs: Iterable[EarlierJob]) -> None:
        """Restore the jobs of an earlier engine that were suspended or running."""
        for job in jobs:
            if job.suspended:
                self._earlier.append(job)
            elif job.quanta:
                self._interrupted[frozenset[int]().union(*job.arrays)] = job

    def take_quanta(self) -> list[QuantumMeasured]:
        """Return the records of the turns that have ended since the last call."""
        measured, self._measured = self._measured, []
        return measured

    def register_groups(self, groups: Iterable[TrialGroup]) -> None:
        """Register groups of trials that the algorithm proposed."""
        self._groups.update((trial.number, group) for group in groups for trial in group.trials)

    def group(self, member: Member) -> TrialGroup | None:
        """Return the group of a trial, or None."""
        return self._groups.get(member.trial.number)

    def split_waiting(
        self, waiting: Sequence[tuple[Member, FusionKey]], now: float
    ) -> tuple[Sequence[tuple[Member, FusionKey]], Sequence[Job]]:
        """Separate waiting members in no job from suspended jobs, which get their present members and epochs."""
        if self._earlier:
            self._suspend_earlier({member.trial.number: (member, key) for member, key in waiting}, now)
        members = {member.trial.number: member for member, _ in waiting}
        kept: set[int] = set()
        for name, (job, history) in list(self.suspended.items()):
            arrays = (
                replace(x, members=tuple(members[n] for m in x.members if (n := m.trial.number) in members))
                for x in job.arrays
            )
            job = replace(job, arrays=tuple(array for array in arrays if array.members))
            del self.suspended[name]
            if job.arrays:
                self.suspended[name] = (job, history)
                kept.update(member.trial.number for member in job.members)
            else:
                self.changes += 1
        self._estimates.clear()
        free = [(member, key) for member, key in waiting if member.trial.number not in kept] if kept else waiting
        self._arrived = {m.trial.number: self._arrived.get(m.trial.number, now) for m, _ in free}
        return free, [job for job, _ in self.suspended.values()]

    def begin(self, job: Job, device: str, share: float | None, now: float) -> None:
        """Record that a job starts on a device."""
        if job.resumes:
            _, history = self.suspended.pop(job.resumes)
        else:
            trials = frozenset(member.trial.number for member in job.members)
            earlier = self._interrupted.pop(trials, None) if job.purpose is Purpose.TRAIN else None
            arrived = self.arrived(job.members, now)
            history = JobHistory(arrived, now, device) if earlier is None else JobHistory.restored(earlier, now)
        history.since, history.turn_since = now, None
        history.device, history.share, history.has_reported, history.may_grow = device, share, False, True
        self._running[job.id] = history

    def register_running(self, running: Iterable[tuple[Job, Device]], now: float) -> None:
        """Register running jobs; an unregistered job begins now."""
        for job, device in running:
            if job.id not in self._running:
                self.begin(job, device.name, None, now)

    def set_share(self, job: str, share: float | None) -> None:
        """Record the new share of a running job."""
        self._running[job].share = share

    def request_preemption(self, job: str, leave: PreemptionRequest, now: float) -> None:
        """Record a request that a job leaves its device."""
        self.leaving[job], self._running[job].preemption_requested_at = leave, now
        self.changes += 1

    def on_report(self, event: Reported, now: float) -> None:
        """Record the losses of a report. The first report after a start also ends the measurement of a switch."""
        history = self._running.get(event.job)
        if history is None:
            return
        if event.losses is not None:
            history.current_turn = (
                event.losses if history.current_turn is None else history.current_turn.followed_by(event.losses)
            )
            if not history.has_reported and history.switch is not None:
                resume_seconds = max(0.0, now - history.since - event.losses.seconds)
                self._switches = [*self._switches, history.switch + resume_seconds][-MAX_SWITCHES:]
                self.switch_seconds = median(self._switches)
                history.switch = None
        if not history.has_reported:
            history.has_reported = True
            self.changes += 1  # the job is preemptible from now on

    def end_helper(self, helper: Job, device: Device, outcome: Outcome) -> None:
        """Record that a helper has ended unasked, so that jobs do not get one after the other in vain; one that has
        finished could not take part, and its leader gets no other.
        """
        leader = self._running.get(helper.assists)
        if outcome not in NOT_TRIAL_FAILURES:
            self._estimates.helper_failures[helper.arrays[0].key, device.kind] += 1
        elif outcome is Outcome.FINISHED and leader is not None:
            leader.may_grow = False

    def refuse_teams(self, key: FusionKey, kind: str) -> None:
        """Give jobs of a key one device of a kind from now on."""
        self._estimates.helper_failures[key, kind] = MAX_HELPER_FAILURES
        self.changes += 1

    def end_turn(self, job: str, now: float) -> None:
        """End the turn of a running job and begin another; a turn without a loss goes on."""
        history = self._running[job]
        if history.current_turn is not None:
            self._add_quantum(job, history, now)
            history.turn_since = now

    def outcome(self, ended: Ended) -> Outcome:
        """Return the outcome of a job: a job that stopped on a request to suspend is SUSPENDED."""
        leave = self.leaving.get(ended.job)
        suspended = leave is not None and leave.suspends
        return Outcome.SUSPENDED if suspended and ended.outcome is Outcome.STOPPED else ended.outcome

    def end(self, job: Job, outcome: Outcome, unfinished: Collection[int], now: float) -> None:
        """Record that a job has left its device, with the outcome of `outcome` and the trials below their targets."""
        history = self._running.pop(job.id, None)
        self.leaving.pop(job.id, None)
        self.changes += 1
        if history is None or outcome is not Outcome.SUSPENDED:
            return
        if history.current_turn is not None and history.turn_since != history.preemption_requested_at:
            self._add_quantum(job.id, history, now)
        history.ran += now - history.since
        history.preemptions += 1
        history.switch, history.since, history.share = now - history.preemption_requested_at, now, None
        done = {member.trial.number for member in job.members}.difference(unfinished)
        self.suspended[job.id] = (replace(job, arrays=remove_members(job.arrays, done)), history)

    def dissolve(self, job: str) -> None:
        """Remove a suspended job; its trials wait for another job."""
        del self.suspended[job]
        self.changes += 1

    def arrived(self, members: Iterable[Member], now: float) -> float:
        """Return the time at which the first of these members began to wait."""
        return min((self._arrived.get(member.trial.number, now) for member in members), default=now)

    def running_view(
        self, job: Job, device: Device, demand: Demand, now: float, further: Sequence[str] = ()
    ) -> JobView:
        """The view of a running job for policies; preemptible are training jobs that have reported since their start,
        so that they make progress between two suspensions.
        """
        history, demands = self._running[job.id], {device.kind: demand}
        view = JobView(
            job.id,
            demands,
            JobState.RUNNING,
            (device.name, *further),
            share=history.share,
            turn_since=history.turn_since,
            ran=history.ran + now - history.since,
            preemptible=job.purpose is Purpose.TRAIN and history.has_reported and job.id not in self.leaving,
            **history.view_fields,
            **self._view_fields(demands, job.arrays, history.summary(job, self.group), on_several=bool(further)),
        )
        if not history.may_grow:
            scaling = replace(view.scaling, devices=min(view.scaling.devices, len(view.devices)), grows=False)
            view = replace(view, scaling=scaling)
        return view

    def suspended_view(self, job: Job, demand: Mapping[str, Demand]) -> JobView:
        """Return the view of a suspended job for policies."""
        _, history = self.suspended[job.id]
        fields = history.view_fields | self._view_fields(demand, job.arrays)
        return JobView(job.id, demand, JobState.SUSPENDED, ran=history.ran, **fields)

    def waiting_view(self, name: str, demand: Mapping[str, Demand], arrays: Sequence[Array], now: float) -> JobView:
        """Return the view of a waiting job for policies."""
        members = [member for array in arrays for member in array.members]
        fields: dict[str, Any] = {"since": self.arrived(members, now)}
        if earlier := self._interrupted.get(frozenset(member.trial.number for member in members)):
            fields |= JobHistory.restored(earlier, now).view_fields | {"ran": earlier.ran} | fields
        return JobView(name, demand, **fields, **self._view_fields(demand, arrays))

    def sorted_by_arrival(self, views: Sequence[JobView]) -> list[JobView]:
        """Return the views by arrival of their jobs; ties keep the given order."""
        histories = {**self._running, **{name: history for name, (_, history) in self.suspended.items()}}
        return sorted(views, key=lambda view: histories[view.id].arrived if view.id in histories else view.since)

    def _view_fields(
        self,
        demand: Mapping[str, Demand],
        arrays: Sequence[Array],
        known: MemberSummary | None = None,
        *,
        on_several: bool = False,
    ) -> dict[str, Any]:
        """Return the fields of a view that depend on its arrays, whose summary may be known, and on the study."""
        summary = known or MemberSummary.of(arrays, self.group)
        return {
            "group": summary.group,
            "critical_path": self._estimates.critical_path(summary.with_follow_up, demand, arrays),
            "budget": summary.budget,
            "epoch": summary.epoch,
            "scaling": self._estimates.scaling(demand, arrays, self.switch_seconds, on_several),
            "switch_seconds": self.switch_seconds,
            "best": self._best,
        }

    def _suspend_earlier(self, waiting: Mapping[int, tuple[Member, FusionKey]], now: float) -> None:
        """Suspend the restored jobs whose trials wait, with those that do."""
        for job in [job for job in self._earlier if not waiting.keys().isdisjoint(frozenset[int]().union(*job.arrays))]:
            self._earlier.remove(job)
            members = [[waiting[number] for number in sorted(each & waiting.keys())] for each in job.arrays]
            arrays = tuple(array for each in members for array in restored_arrays(each))
            self.suspended[job.id] = Job(job.id, arrays), JobHistory.restored(job, now)
            self.changes += 1

    def _add_quantum(self, job: str, history: JobHistory, now: float) -> None:
        losses, history.current_turn = history.current_turn, None
        assert losses is not None
        started = history.since if history.turn_since is None else history.turn_since
        # Arrays of one job may report the same seconds, and a program that was killed reports none.
        elapsed = max(now - started, _MIN_SECONDS)
        quantum = replace(losses, seconds=min(losses.seconds or elapsed, elapsed))
        self._measured.append(QuantumMeasured(job, len(history.quanta), quantum))
        history.quanta = (*history.quanta, quantum)
        if isfinite(losses.lowest):
            self._best = losses.lowest if self._best is None else min(self._best, losses.lowest)


def _max_sharing(demand: Demand) -> int:
    """Return the largest number of such jobs on one device without slow-down, by the compute demand of one job."""
    return max(1, int(1 / demand.compute + 1e-9)) if demand.compute > 0 else 1
