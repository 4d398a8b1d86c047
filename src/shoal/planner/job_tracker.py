"""Runtime history of each job across suspensions, and the suspended jobs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Any

from shoal.core.array import Array, FusionKey, Member, remove_members
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.event import Ended, Outcome, Reported, TurnStats
from shoal.core.job import Job, Purpose
from shoal.core.trial import TrialGroup
from shoal.cost.estimate import fetching, seconds
from shoal.cost.scaling import Scaling, crowded_scaling, spread_scaling
from shoal.planner.partition import Profiles
from shoal.schedule.action import JobState
from shoal.schedule.base import JobView

__all__ = ["JobTracker", "PreemptionRequest"]

SWITCH_SECONDS = 0.5
"""Assumed cost of suspending and resuming a job, until the study has measured one."""

REMEMBERED = 101
"""Number of newest switches whose median is the cost of a switch."""


@dataclass(frozen=True)
class PreemptionRequest:
    """Request that a job leaves its device.

    Args:
        keeps: Whether the job is suspended and its arrays stay one job; else its trials wait again.
        reason: Reason in words.
    """

    keeps: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _MemberSummary:
    """Facts about a job that follow from its members.

    Args:
        group: Name of the group of all members, or None.
        budget: Target epoch of the member with the most epochs left; None without members.
        epoch: Epochs that this member has trained.
        followed: Arrays after which training may follow, each with pairs of epochs left and epochs that may follow.
    """

    group: str | None
    budget: int | None
    epoch: int
    followed: tuple[tuple[Array, AbstractSet[tuple[int, int]]], ...]

    @classmethod
    def of(cls, arrays: Sequence[Array], group_of: Callable[[Member], TrialGroup | None]) -> "_MemberSummary":
        """The summary of the members of some arrays."""
        names: set[str] = set()
        longest: Member | None = None
        followed: list[tuple[Array, AbstractSet[tuple[int, int]]]] = []
        for array in arrays:
            ahead: set[tuple[int, int]] = set()
            for member, epochs in zip(array.members, array.epochs, strict=True):
                group = group_of(member)
                names.add("" if group is None else group.name)
                if group is not None and group.epochs_ahead:
                    ahead.add((epochs, group.epochs_ahead))
                if longest is None or epochs > longest.epochs:
                    longest = member
            if ahead:
                followed.append((array, ahead))
        return cls(
            (names.pop() or None) if len(names) == 1 else None,
            None if longest is None else longest.target,
            0 if longest is None else longest.start,
            tuple(followed),
        )


@dataclass
class _JobHistory:
    """History of one job.

    Args:
        arrived: Time at which its first trial began to wait.
        since: Time at which the job entered its current state.
        devices: Current or last devices; the first one is the home of the job.
        share: Share of the compute of its device, or None.
        ran: Seconds on devices before the current stretch.
        quanta: Statistics of the finished turns.
        turn: Statistics of the current turn so far, or None.
        turn_began: Start of the current turn.
        shown: Whether the job has reported anything in the current stretch.
        asked: Time of the last request to leave its device.
        switch: Seconds that the last departure from its device took.
        seen: The job of the last view, and the summary of its members.
    """

    arrived: float
    since: float
    devices: tuple[str, ...]
    share: float | None = None
    ran: float = 0.0
    quanta: tuple[TurnStats, ...] = ()
    turn: TurnStats | None = None
    turn_began: float = 0.0
    shown: bool = False
    asked: float = 0.0
    switch: float | None = None
    seen: tuple[Job, _MemberSummary] | None = None


class _ProfileEstimates:
    """Estimates of jobs from the profiles of their arrays.

    Args:
        profiles: Profile of a key on a kind of device, or None.
    """

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles
        self._scalings: dict[object, Scaling] = {}  # one per kind of job, within one turn of planning

    def clear(self) -> None:
        """Forget cached scalings, as profiles may have changed."""
        self._scalings.clear()

    def critical_path(
        self,
        followed: Sequence[tuple[Array, AbstractSet[tuple[int, int]]]],
        demand: Mapping[str, Demand],
        arrays: Sequence[Array],
    ) -> float:
        """Seconds until the last training that may follow a member ends, on the kind of device that is fastest for
        the job; 0 if nothing follows, or nothing was measured. All epochs of the job are taken as equally long.
        """
        if not followed or not demand:
            return 0.0
        kind = min(demand, key=lambda kind: demand[kind].seconds)
        epoch = demand[kind].seconds / max(1, *(epochs for array in arrays for epochs in array.epochs))
        ends = [0.0]
        for array, ahead in followed:
            if (profile := self._profiles(array.key, kind)) is not None:
                ends += (epoch * left + seconds(profile, [more]) + fetching(profile, [more]) for left, more in ahead)
        return max(ends)

    def scaling(self, demand: Mapping[str, Demand], arrays: Sequence[Array], switch_seconds: float) -> Scaling:
        """Scaling of a job on the kind of device that scales worst: as measured, else as its demand implies."""
        alike = (arrays[0].key if len(arrays) == 1 else None, tuple([(kind, d.compute) for kind, d in demand.items()]))
        if alike in self._scalings:
            return self._scalings[alike]
        found: list[Scaling] = []
        for kind, each in demand.items():
            expected = _sharing(each)
            known = self._profiles(arrays[0].key, kind) if len(arrays) == 1 else None
            seen = (None if known is None else crowded_scaling(known, expected)) or Scaling(1.0, sharing=expected)
            found.append(seen if known is None else spread_scaling(known, seen))
        worst = min(found, key=lambda scaling: (scaling.sharing, -scaling.alpha), default=Scaling(1.0))
        self._scalings[alike] = replace(worst, resize_seconds=switch_seconds)
        return self._scalings[alike]


class JobTracker:
    """Keeps the history of every job that trains or is suspended, and shows jobs to policies.

    For the back end and the journal a suspended job has ended; the job that resumes it has another id and the same
    history. The trials of a suspended job are `PENDING`, but are not put into new arrays. Finished trials leave the
    job, and a job without trials is removed. After a kill of the engine no job is suspended.

    A quantum holds the losses that a job measured in one turn. A turn ends when the job leaves its device, or by
    `end_turns`.

    Args:
        profiles: Profile of a key on a kind of device, or None.
    """

    def __init__(self, profiles: Profiles = lambda key, kind: None) -> None:
        self.changes = 0
        """Count of changes: requests to leave, departures, dissolved jobs, and jobs that have become preemptible."""
        self.leaving: dict[str, PreemptionRequest] = {}
        """Requests that are still open, by the id of the job."""
        self.switch_seconds = SWITCH_SECONDS
        """Cost of suspending and resuming a job: request to departure, plus start to first step."""
        self._estimates = _ProfileEstimates(profiles)
        self._on: dict[str, _JobHistory] = {}
        self._off: dict[str, tuple[Job, _JobHistory]] = {}
        self._arrived: dict[int, float] = {}  # by number of a waiting trial that is in no job
        self._groups: dict[int, TrialGroup] = {}  # by number of the trial
        self._best: float | None = None
        self._switches: list[float] = []

    @property
    def suspended(self) -> Sequence[str]:
        """Ids of the suspended jobs."""
        return tuple(self._off)

    def enlist(self, groups: Iterable[TrialGroup]) -> None:
        """Register groups of trials that the algorithm proposed."""
        self._groups.update((trial.number, group) for group in groups for trial in group.trials)

    def group(self, member: Member) -> TrialGroup | None:
        """The group of a trial, or None."""
        return self._groups.get(member.trial.number)

    def look(
        self, waiting: Sequence[tuple[Member, FusionKey]], now: float
    ) -> tuple[Sequence[tuple[Member, FusionKey]], Sequence[Job]]:
        """Separate waiting members that are in no job from the members of suspended jobs.

        Returns:
            The members in no job, and the suspended jobs with their current members at their current epochs.
        """
        members = {member.trial.number: member for member, _ in waiting}
        kept: set[int] = set()
        for name, (job, history) in list(self._off.items()):
            arrays = (
                replace(x, members=tuple(members[n] for m in x.members if (n := m.trial.number) in members))
                for x in job.arrays
            )
            job = replace(job, arrays=tuple(array for array in arrays if array.members))
            del self._off[name]
            if job.arrays:
                self._off[name] = (job, history)
                kept.update(member.trial.number for member in job.members)
            else:
                self.changes += 1
        self._estimates.clear()
        free = [(member, key) for member, key in waiting if member.trial.number not in kept] if kept else waiting
        self._arrived = {m.trial.number: self._arrived.get(m.trial.number, now) for m, _ in free}
        return free, [job for job, _ in self._off.values()]

    def begin(self, job: Job, devices: tuple[str, ...], share: float | None, now: float) -> None:
        """Note that a job starts on devices."""
        if job.resumes:
            _, history = self._off.pop(job.resumes)
        else:
            history = _JobHistory(self.arrived(job.members, now), now, devices)
        history.since = history.turn_began = now
        history.devices, history.share, history.shown = devices, share, False
        self._on[job.id] = history

    def meet(self, running: Iterable[tuple[Job, Device]], now: float) -> None:
        """Register running jobs; an unregistered job begins now."""
        for job, device in running:
            if job.id not in self._on:
                self.begin(job, (device.name, *job.helpers), None, now)

    def devices(self, job: str) -> tuple[str, ...]:
        """Devices of a running job."""
        return self._on[job].devices

    def reshare(self, job: str, share: float | None) -> None:
        """Note the new share of a running job."""
        self._on[job].share = share

    def leave(self, job: str, leave: PreemptionRequest, now: float) -> None:
        """Note a request that a job leaves its device."""
        self.leaving[job], self._on[job].asked = leave, now
        self.changes += 1

    def on_report(self, event: Reported, now: float) -> None:
        """Note the losses of a report, and the first report of a stretch."""
        history = self._on.get(event.job)
        if history is None:
            return
        if event.losses is not None:
            history.turn = event.losses if history.turn is None else history.turn.followed_by(event.losses)
            if not history.shown and history.switch is not None:
                back = max(0.0, now - history.since - event.losses.seconds)
                self._switches = [*self._switches, history.switch + back][-REMEMBERED:]
                self.switch_seconds = median(self._switches)
                history.switch = None
        if not history.shown:
            history.shown = True
            self.changes += 1  # it may be suspended now

    def end_turns(self, now: float, least: float) -> None:
        """End the turns that have lasted at least `least` seconds."""
        for history in self._on.values():
            if now - history.turn_began >= least:
                self._end_turn(history, now)

    def outcome(self, ended: Ended) -> Outcome:
        """Outcome of a job: a job that stopped on a request to suspend is SUSPENDED."""
        leave = self.leaving.get(ended.job)
        suspended = leave is not None and leave.keeps
        return Outcome.SUSPENDED if suspended and ended.outcome is Outcome.STOPPED else ended.outcome

    def end(self, job: Job, outcome: Outcome, left: Collection[int], now: float) -> None:
        """Note that a job has left its device.

        Args:
            job: The job with its members.
            outcome: Result of `outcome`.
            left: Numbers of the trials that have not reached their targets.
            now: Time in seconds.
        """
        history = self._on.pop(job.id, None)
        self.leaving.pop(job.id, None)
        self.changes += 1
        if history is None or outcome is not Outcome.SUSPENDED:
            return
        self._end_turn(history, now)
        history.ran += now - history.since
        history.switch, history.since, history.share = now - history.asked, now, None
        done = {member.trial.number for member in job.members}.difference(left)
        self._off[job.id] = (replace(job, arrays=remove_members(job.arrays, done)), history)

    def dissolve(self, job: str) -> None:
        """Remove a suspended job; its trials wait for another job."""
        del self._off[job]
        self.changes += 1

    def arrived(self, members: Iterable[Member], now: float) -> float:
        """Time at which the first of these members began to wait."""
        return min((self._arrived.get(member.trial.number, now) for member in members), default=now)

    def running(self, job: Job, device: Device, demand: Demand, now: float) -> JobView:
        """View of a running job for policies.

        A survey or profile job is not preemptible. A training job is preemptible after its first report, so that each
        stretch makes progress.

        Args:
            job: The job with its current members.
            device: Device of the job; the helpers of the job are its further devices.
            demand: Demand on this device.
            now: Time in seconds.
        """
        history, demands = self._on[job.id], {device.kind: demand}
        return JobView(
            job.id,
            demands,
            JobState.RUNNING,
            (device.name, *job.helpers),
            share=history.share,
            ran=history.ran + now - history.since,
            preemptible=job.purpose is Purpose.TRAIN and history.shown and job.id not in self.leaving,
            **_history_fields(history),
            **self._study_fields(self._of_members(history, job), demands, job.arrays),
        )

    def off(self, job: Job, demand: Mapping[str, Demand]) -> JobView:
        """View of a suspended job for policies."""
        _, history = self._off[job.id]
        fields = _history_fields(history) | self._fields(demand, job.arrays)
        return JobView(job.id, demand, JobState.SUSPENDED, ran=history.ran, **fields)

    def waiting(self, name: str, demand: Mapping[str, Demand], arrays: Sequence[Array], now: float) -> JobView:
        """View of a waiting job for policies."""
        arrived = self.arrived([member for array in arrays for member in array.members], now)
        return JobView(name, demand, since=arrived, **self._fields(demand, arrays))

    def in_order(self, views: Sequence[JobView]) -> list[JobView]:
        """Views by arrival of their jobs; ties keep the given order."""
        histories = {**self._on, **{name: history for name, (_, history) in self._off.items()}}
        return sorted(views, key=lambda view: histories[view.id].arrived if view.id in histories else view.since)

    def _of_members(self, history: _JobHistory, job: Job) -> _MemberSummary:
        """Summary of the members of a running job, cached until the job changes."""
        if history.seen is None or history.seen[0] is not job:
            history.seen = job, _MemberSummary.of(job.arrays, self.group)
        return history.seen[1]

    def _fields(self, demand: Mapping[str, Demand], arrays: Sequence[Array]) -> dict[str, Any]:
        """Fields of a view that follow from arrays and from the study."""
        return self._study_fields(_MemberSummary.of(arrays, self.group), demand, arrays)

    def _study_fields(
        self, of: _MemberSummary, demand: Mapping[str, Demand], arrays: Sequence[Array]
    ) -> dict[str, Any]:
        return {
            "group": of.group,
            "critical_path": self._estimates.critical_path(of.followed, demand, arrays),
            "budget": of.budget,
            "epoch": of.epoch,
            "scaling": self._estimates.scaling(demand, arrays, self.switch_seconds),
            "switch_seconds": self.switch_seconds,
            "best": self._best,
        }

    def _end_turn(self, history: _JobHistory, now: float) -> None:
        turn, history.turn = history.turn, None
        if turn is not None:
            took = min(turn.seconds, now - history.turn_began)  # arrays of one job may report the same seconds
            history.quanta = (*history.quanta, replace(turn, seconds=took))
            if isfinite(turn.lowest):
                self._best = turn.lowest if self._best is None else min(self._best, turn.lowest)
        history.turn_began = now


def _history_fields(history: _JobHistory) -> dict[str, Any]:
    """Fields of a view that follow from the history of the job."""
    return {"since": history.since, "quanta": history.quanta, "home": history.devices[0]}


def _sharing(demand: Demand) -> int:
    """Largest number of such jobs on one device without slow-down, by the compute demand of one job."""
    return max(1, int(1 / demand.compute + 1e-9)) if demand.compute > 0 else 1
