"""What jobs have been through, over all their stretches on devices; and those that are suspended."""

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
"""What suspending and resuming a job is taken to cost, together, until the study has done it."""

REMEMBERED = 101
"""Switches of which the middle one counts, the newest."""


@dataclass(frozen=True)
class PreemptionRequest:
    """What a job was asked for that is to leave its device.

    Args:
        keeps: whether it is suspended, so that its arrays stay one job; else its trials wait again.
        reason: in words.
    """

    keeps: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _MemberSummary:
    """What the members of a job say of it.

    Args:
        group: name of the group that all of them belong to, or None.
        budget: epochs that the one with the most before it is to train for, in all; None without members.
        epoch: epochs that it has trained for.
        followed: of arrays from which more may follow, epochs that members have left, and those that may follow.
    """

    group: str | None
    budget: int | None
    epoch: int
    followed: tuple[tuple[Array, AbstractSet[tuple[int, int]]], ...]

    @classmethod
    def of(cls, arrays: Sequence[Array], group_of: Callable[[Member], TrialGroup | None]) -> "_MemberSummary":
        """What those of some arrays say."""
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
    """What a job has been through.

    Args:
        arrived: when its first trial began to wait.
        since: when it came into its state.
        devices: those that it is on, or was on last; the first one is its home.
        share: of its device's compute, or None.
        ran: seconds that it had devices for before this stretch.
        quanta: measured so far.
        turn: what it has measured since then, or None.
        turn_began: when.
        shown: whether it has reported anything in this stretch.
        asked: when it was asked to leave its device.
        switch: seconds that leaving its device took the last time.
        seen: the job as it was last shown, and what its members say of it.
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


class JobTracker:
    """Keeps the course of every job that trains or is suspended, and tells policies of it.

    A job that was suspended has ended for its back end and in the journal; the one that goes on with it has another id
    and the same course. Its trials wait, as far as everybody else knows, but are not cut into new arrays. Those that
    are over leave it; a job without any is no more. After a kill of the engine nothing is suspended.

    A quantum is what a job has measured in a turn. Turns are ended when the job leaves its device, and by `end_turns`.

    Args:
        profiles: what is known of a key on a kind of device.
    """

    def __init__(self, profiles: Profiles = lambda key, kind: None) -> None:
        self.changes = 0
        """How often a job was asked to leave its device, came off it, was dissolved, or may leave it from then on."""
        self.leaving: dict[str, PreemptionRequest] = {}
        """The jobs that were asked to leave their devices and have not done so yet."""
        self.switch_seconds = SWITCH_SECONDS
        """What suspending and resuming a job costs, together: up to when it has left, and up to its first step."""
        self._profiles = profiles
        self._on: dict[str, _JobHistory] = {}
        self._off: dict[str, tuple[Job, _JobHistory]] = {}
        self._arrived: dict[int, float] = {}  # trials that wait and are in no job
        self._groups: dict[int, TrialGroup] = {}  # by number of the trial
        self._best: float | None = None
        self._switches: list[float] = []
        self._scalings: dict[object, Scaling] = {}  # of what is alike, in one turn of planning

    @property
    def suspended(self) -> Sequence[str]:
        """Ids of the suspended jobs."""
        return tuple(self._off)

    def enlist(self, groups: Iterable[TrialGroup]) -> None:
        """An algorithm wants groups trained."""
        self._groups.update((trial.number, group) for group in groups for trial in group.trials)

    def group(self, member: Member) -> TrialGroup | None:
        """That an algorithm wants a trial trained with, None if that was not said."""
        return self._groups.get(member.trial.number)

    def look(
        self, waiting: Sequence[tuple[Member, FusionKey]], now: float
    ) -> tuple[Sequence[tuple[Member, FusionKey]], Sequence[Job]]:
        """Part those that wait.

        Returns:
            Those that are in no job, and the suspended jobs with the members that they have now, from where these are.
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
        self._scalings.clear()
        free = [(member, key) for member, key in waiting if member.trial.number not in kept] if kept else waiting
        self._arrived = {m.trial.number: self._arrived.get(m.trial.number, now) for m, _ in free}
        return free, [job for job, _ in self._off.values()]

    def begin(self, job: Job, devices: tuple[str, ...], share: float | None, now: float) -> None:
        """A job is about to start on devices."""
        if job.resumes:
            _, history = self._off.pop(job.resumes)
        else:
            history = _JobHistory(self.arrived(job.members, now), now, devices)
        history.since = history.turn_began = now
        history.devices, history.share, history.shown = devices, share, False
        self._on[job.id] = history

    def meet(self, running: Iterable[tuple[Job, Device]], now: float) -> None:
        """These jobs are on devices; those that it has not heard of begin now."""
        for job, device in running:
            if job.id not in self._on:
                self.begin(job, (device.name, *job.helpers), None, now)

    def devices(self, job: str) -> tuple[str, ...]:
        """Those that a running job is on."""
        return self._on[job].devices

    def reshare(self, job: str, share: float | None) -> None:
        """A job goes on with another share of its device."""
        self._on[job].share = share

    def leave(self, job: str, leave: PreemptionRequest, now: float) -> None:
        """A job is about to be asked to leave its device."""
        self.leaving[job], self._on[job].asked = leave, now
        self.changes += 1

    def on_report(self, event: Reported, now: float) -> None:
        """A job has told how far it is."""
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
        """Write down what jobs have measured in turns that have lasted so many seconds at least."""
        for history in self._on.values():
            if now - history.turn_began >= least:
                self._end_turn(history, now)

    def outcome(self, ended: Ended) -> Outcome:
        """How a job has ended: one that stopped may have been asked to for later."""
        leave = self.leaving.get(ended.job)
        suspended = leave is not None and leave.keeps
        return Outcome.SUSPENDED if suspended and ended.outcome is Outcome.STOPPED else ended.outcome

    def end(self, job: Job, outcome: Outcome, left: Collection[int], now: float) -> None:
        """A job has left its device.

        Args:
            job: with its members.
            outcome: as `outcome` said.
            left: numbers of the trials that have not reached their targets.
            now: seconds.
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
        """The trials of a suspended job wait for another."""
        del self._off[job]
        self.changes += 1

    def arrived(self, members: Iterable[Member], now: float) -> float:
        """When the first of these began to wait."""
        return min((self._arrived.get(member.trial.number, now) for member in members), default=now)

    def running(self, view: JobView, job: Job, now: float) -> JobView:
        """A job that runs, as policies see it; one that is measured or looked at stays where it is, as one that has
        shown nothing since it began: so each stretch leads further.

        Args:
            view: its device and demand.
            job: with the members that it has now.
            now: seconds.
        """
        history = self._on[job.id]
        return replace(
            view,
            **_been_through(history),
            **self._said_of(self._of_members(history, job), view.demand, job.arrays),
            share=history.share,
            ran=history.ran + now - history.since,
            preemptible=job.purpose is Purpose.TRAIN and history.shown and job.id not in self.leaving,
        )

    def off(self, job: Job, demand: Mapping[str, Demand]) -> JobView:
        """A suspended job as policies see it."""
        _, history = self._off[job.id]
        told = _been_through(history) | self._described(demand, job.arrays)
        return JobView(job.id, demand, JobState.SUSPENDED, ran=history.ran, **told)

    def waiting(self, name: str, demand: Mapping[str, Demand], arrays: Sequence[Array], now: float) -> JobView:
        """Arrays that wait to be one job, as policies see them."""
        arrived = self.arrived([member for array in arrays for member in array.members], now)
        return JobView(name, demand, since=arrived, **self._described(demand, arrays))

    def in_order(self, views: Sequence[JobView]) -> list[JobView]:
        """The oldest job first; of equals in the order given."""
        courses = {**self._on, **{name: history for name, (_, history) in self._off.items()}}
        return sorted(views, key=lambda view: courses[view.id].arrived if view.id in courses else view.since)

    def _of_members(self, history: _JobHistory, job: Job) -> _MemberSummary:
        """What the members of a running job say of it; as before, if none of them has moved."""
        if history.seen is None or history.seen[0] is not job:
            history.seen = job, _MemberSummary.of(job.arrays, self.group)
        return history.seen[1]

    def _described(self, demand: Mapping[str, Demand], arrays: Sequence[Array]) -> dict[str, Any]:
        """What arrays, and the study, say of a job, as fields of its view."""
        return self._said_of(_MemberSummary.of(arrays, self.group), demand, arrays)

    def _said_of(self, of: _MemberSummary, demand: Mapping[str, Demand], arrays: Sequence[Array]) -> dict[str, Any]:
        return {
            "group": of.group,
            "critical_path": self._critical_path(of.followed, demand, arrays),
            "budget": of.budget,
            "epoch": of.epoch,
            "scaling": self._scaling(demand, arrays),
            "switch_seconds": self.switch_seconds,
            "best": self._best,
        }

    def _critical_path(
        self,
        followed: Sequence[tuple[Array, AbstractSet[tuple[int, int]]]],
        demand: Mapping[str, Demand],
        arrays: Sequence[Array],
    ) -> float:
        """Seconds until the last training that may follow from a member ends, all epochs of a job being taken to be
        equally long, on the kind of device that is the fastest for it; 0 where nothing follows, or was measured.
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

    def _scaling(self, demand: Mapping[str, Demand], arrays: Sequence[Array]) -> Scaling:
        """How a job does in company, on the kind of device on which it does worst: as was seen, else as it asks for."""
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
        self._scalings[alike] = replace(worst, resize_seconds=self.switch_seconds)
        return self._scalings[alike]

    def _end_turn(self, history: _JobHistory, now: float) -> None:
        turn, history.turn = history.turn, None
        if turn is not None:
            took = min(turn.seconds, now - history.turn_began)  # arrays of one job may tell of the same ones
            history.quanta = (*history.quanta, replace(turn, seconds=took))
            if isfinite(turn.lowest):
                self._best = turn.lowest if self._best is None else min(self._best, turn.lowest)
        history.turn_began = now


def _been_through(history: _JobHistory) -> dict[str, Any]:
    """What the course of a job says of it, as fields of its view."""
    return {"since": history.since, "quanta": history.quanta, "home": history.devices[0]}


def _sharing(demand: Demand) -> int:
    """Most jobs of a kind on one device that do not slow each other down, by the compute that one asks for."""
    return max(1, int(1 / demand.compute + 1e-9)) if demand.compute > 0 else 1
