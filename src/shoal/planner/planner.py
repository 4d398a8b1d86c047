"""The planner: one turn of planning, from trials to arrays to jobs to devices."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import MappingProxyType

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.job import Job, Purpose
from shoal.core.resources import Ledger, Share
from shoal.core.trial import TrialGroup
from shoal.planner.admission import admit
from shoal.planner.grouping import Grouping
from shoal.planner.job_tracker import JobTracker, PreemptionRequest
from shoal.planner.limits import jobs_to_restart, limit_placed
from shoal.planner.partition import Profiles, ResourceLimit, by_family, partition, round_robin
from shoal.planner.planning_context import PROFILE_MEMBERS, PlanningContext, reservations
from shoal.schedule.base import Action, JobView, Policy, Resize, Resume, Start, Stop, Suspend
from shoal.schedule.check import check_plan, feasible

__all__ = ["MIN_POLL_SECONDS", "Placement", "Planner", "WaitingWork"]

MIN_POLL_SECONDS = 0.005
"""Shortest time between two polls for events, even if the next turn of planning is due."""


@dataclass(frozen=True)
class Placement:
    """The result of a turn of planning: the jobs to start, and the reasons why other trials wait.

    Args:
        starts: Jobs to start, with their devices; helpers follow their leaders. The trials of a profile job are a
            sample and still wait.
        refusals: Number of the trial -> reason, for every waiting trial that is in no training job of `starts` and
            joins no running job.
    """

    starts: tuple[tuple[Job, Device], ...]
    refusals: Mapping[int, str]
    joins: Mapping[str, tuple[Array, ...]] = field(default_factory=dict)
    preemptions: Mapping[str, PreemptionRequest] = field(default_factory=dict)
    reservations: Mapping[str, Demand] = field(default_factory=dict)


@dataclass
class _Draft:
    placed: list[tuple[Job, Device]] = field(default_factory=list)
    refused: list[tuple[Array, str]] = field(default_factory=list)
    deferred: dict[int, str] = field(default_factory=dict)
    shares: dict[str, float | None] = field(default_factory=dict)
    preemptions: dict[str, PreemptionRequest] = field(default_factory=dict)
    wake: float = inf
    work: "WaitingWork | None" = None


class Planner:
    """Fuses waiting trials into arrays, packs arrays into jobs, and places the jobs by the policy.

    Keys without a profile are profiled first. An array without a device joins a running job if that saves time. Arrays
    that do not start are discarded: the next turn fuses and packs all trials that wait then. Only the history of jobs
    is kept between turns. A suspended job keeps its arrays until the policy resumes it. Only if `elastic`, the members
    of a running array can change, and can be at different epochs.
    """

    def __init__(
        self,
        policy: Policy,
        profiles: Profiles,
        new_id: Callable[[], str],
        elastic: bool = True,
        grouping: Grouping | None = None,
        fuse: bool = True,
        trained_epochs: Callable[[FusionKey], int] = lambda key: 0,
        tracker: JobTracker | None = None,
        limits_shares: Callable[[Device], bool] = lambda device: False,
    ) -> None:
        self._limits_shares = limits_shares
        self._policy = policy
        self._profiles = profiles
        self._new_id = new_id
        self._elastic = elastic
        self._grouping = grouping or Grouping()
        self._fuse = fuse
        self._trained_epochs = trained_epochs
        self.tracker = tracker or JobTracker(profiles)
        self.wake = inf
        """Latest time of the next turn of planning; inf: only after a change."""

    def set_policy(self, policy: Policy) -> None:
        """Replace the policy from the next turn on."""
        self._policy = policy

    def plan(
        self,
        waiting: Sequence[tuple[Member, FusionKey]],
        running: Sequence[tuple[Job, Device]],
        cluster: Cluster,
        now: float,
        *,
        alone: AbstractSet[int] = frozenset(),
        unmeasurable: AbstractSet[tuple[FusionKey, str]] = frozenset(),
        limits: Mapping[int, ResourceLimit] = MappingProxyType({}),
    ) -> Placement:
        """Decide which jobs start now.

        A key without a profile on any kind of device in the cluster is profiled first, on an idle device. Trials in
        `alone`, and trials of a key that cannot be profiled, get an array of one member each, and a whole device if
        there is no profile.

        Args:
            waiting: Waiting members, oldest first, including those of suspended jobs; each trial occurs once.
            running: All jobs that hold devices, oldest first, with their current members.
            now: Time in seconds, for the policy.
            unmeasurable: Pairs of key and kind of device whose profile job failed; it is not repeated.
        """
        profile_members = PROFILE_MEMBERS if self._fuse else 1
        planning = PlanningContext(
            self._profiles,
            cluster,
            alone,
            unmeasurable,
            limits,
            profile_members,
            self._trained_epochs,
            self._limits_shares,
        )
        waiting, suspended = self.tracker.split_waiting(waiting, now)
        unshared = alone | limits.keys()
        keyed = self._with_family_keys(waiting, planning, unmeasurable, unshared)
        profiling = self._profile_jobs(waiting, keyed, running, planning)
        held = [*running, *profiling]
        self.tracker.register_running(held, now)
        views, dismissed = self._running_views(held, planning, now)
        ready = [(member, key) for member, key in keyed if planning.ready(member, key)]
        groups = self._groups(ready, views, planning, alone, limits) if ready else []
        draft = self._run_policy(views, suspended, groups, held, planning, now)
        draft.preemptions |= dismissed
        self._limit_shares(draft, held, views, now)
        joins = self._joins(held, draft, planning, unshared) if self._elastic and draft.refused else {}
        unmeasured = _measuring_reasons(keyed, held, planning) if len(ready) < len(keyed) else {}
        reasons = {**_refusal_reasons(draft.refused, joins), **unmeasured, **draft.deferred}
        self.wake = draft.wake
        reserved = reservations(running, joins, planning, draft.shares)
        return Placement((*profiling, *draft.placed), reasons, joins, draft.preemptions, reserved)

    def _limit_shares(
        self, draft: _Draft, held: Sequence[tuple[Job, Device]], views: Sequence[JobView], now: float
    ) -> None:
        """Give the placed jobs their limits, and let running jobs leave for whose processes another limit pays."""
        draft.placed = limit_placed(draft.placed, held, self._limits_shares)
        for name, leave in jobs_to_restart(held, draft.placed, views, draft.shares).items():
            if name not in draft.preemptions:
                draft.preemptions[name] = leave
                self.tracker.request_preemption(name, leave, now)

    def _running_views(
        self, held: Sequence[tuple[Job, Device]], planning: PlanningContext, now: float
    ) -> tuple[list[JobView], dict[str, PreemptionRequest]]:
        """Return the views of all jobs that hold devices, and requests to helpers that do not make steps faster.

        A helper is one more device of its leader. A helper that is about to leave has a view of its own until then.
        """
        teams = _teams(held, self.tracker.leaving)
        views: list[JobView] = []
        dismissed: dict[str, PreemptionRequest] = {}
        for job, device in held:
            if job.purpose is Purpose.ASSIST:
                continue
            helpers = teams.get(job.id, {})
            view = self._running_view(job, device, tuple(helpers), planning, now)
            for name in view.devices[view.scaling.max_devices :]:
                reason = f"steps of {job.id} are not faster on {len(view.devices)} devices"
                dismissed[helpers[name]] = PreemptionRequest(False, reason)
                self.tracker.request_preemption(helpers[name], dismissed[helpers[name]], now)
            views.append(replace(view, devices=view.devices[: view.scaling.max_devices]))
        in_team = {helper for team in teams.values() for helper in team.values()} - dismissed.keys()
        leaving = [each for each in held if each[0].purpose is Purpose.ASSIST and each[0].id not in in_team]
        return [*views, *(self._running_view(job, device, (), planning, now) for job, device in leaving)], dismissed

    def _running_view(
        self, job: Job, device: Device, further: tuple[str, ...], planning: PlanningContext, now: float
    ) -> JobView:
        """The view of a running job, whose turn ends if it has lasted as long as the policy says."""
        demand = planning.running_demand(job, device)
        view = self.tracker.running_view(job, device, demand, now, further)
        if view.preemptible and self._policy.turn_is_over(view, now):
            self.tracker.end_turn(job.id, now)
            view = self.tracker.running_view(job, device, demand, now, further)
        return view

    def _with_family_keys(
        self,
        waiting: Sequence[tuple[Member, FusionKey]],
        planning: PlanningContext,
        unmeasurable: AbstractSet[tuple[FusionKey, str]],
        unshared: AbstractSet[int],
    ) -> Sequence[tuple[Member, FusionKey]]:
        """Return the waiting members, with the key of their family where one partially fused array is faster."""
        if not self._fuse:
            return waiting
        kinds = {device.kind for device in planning.devices}
        relative_time = partial(self._grouping.relative_time, kinds=kinds)
        return by_family(waiting, self._profiles, kinds, unmeasurable, unshared, relative_time)

    def _profile_jobs(
        self,
        waiting: Sequence[tuple[Member, FusionKey]],
        keyed: Sequence[tuple[Member, FusionKey]],
        running: Sequence[tuple[Job, Device]],
        planning: PlanningContext,
    ) -> list[tuple[Job, Device]]:
        sampled = keyed
        if keyed is not waiting:  # the sample of a family has members of each of its structures
            key_of = {member.trial.number: key for member, key in keyed}
            sampled = [(member, key_of[member.trial.number]) for member in round_robin(waiting)]
        samples = planning.samples(sampled, running)
        return [
            (Job(self._new_id(), arrays, Purpose.PROFILE, limit=limit), device) for arrays, device, limit in samples
        ]

    def _groups(
        self,
        ready: Sequence[tuple[Member, FusionKey]],
        views: Sequence[JobView],
        planning: PlanningContext,
        alone: AbstractSet[int],
        limits: Mapping[int, ResourceLimit],
    ) -> list[tuple[Array, ...]]:
        busy = _seconds_until_free(views)
        unfused = alone if self._fuse else {member.trial.number for member, _ in ready}
        arrays = partition(ready, self._profiles, planning.devices, busy, unfused, self._elastic, limits)
        unshared = alone | limits.keys()
        return self._grouping.groups(arrays, self._profiles, planning.devices, busy, unshared, self.tracker.group)

    @property
    def has_wake_time(self) -> bool:
        """Whether the next turn of planning is due at a time, and not only after an event."""
        return self.wake < inf

    def wait_seconds(self, now: float, max_seconds: float) -> float:
        """Return the seconds to wait for events, at most `max_seconds`."""
        return min(max_seconds, max(MIN_POLL_SECONDS, self.wake - now))

    def _joins(
        self,
        held: Sequence[tuple[Job, Device]],
        draft: _Draft,
        planning: PlanningContext,
        alone: AbstractSet[int],
    ) -> dict[str, tuple[Array, ...]]:
        """Return the arrays without a device that join running jobs, except jobs that are to leave their devices."""
        free = Ledger(planning.cluster)
        for job, device in (*held, *draft.placed):
            if device.name in free:
                demand = planning.running_demand(job, device)
                free.add(job.id, free[device.name], Share(memory=demand.memory, cores=demand.cores))
        held = [(job, device) for job, device in held if device.name in free and free[device.name].device.healthy]
        held = [(job, device) for job, device in held if job.id not in self.tracker.leaving]
        arrays = [array for array, _ in draft.refused]
        return admit(arrays, held, free, self._profiles, self._grouping, alone, self._fuse)

    def _run_policy(
        self,
        running: Sequence[JobView],
        suspended: Sequence[Job],
        groups: Sequence[tuple[Array, ...]],
        held: Sequence[tuple[Job, Device]],
        planning: PlanningContext,
        now: float,
    ) -> _Draft:
        """Ask the policy for a plan, and apply its feasible part. Only groups that start become jobs with an id."""
        candidates = {f"waiting-{index}": group for index, group in enumerate(groups)}
        known = [*running, *(self.tracker.suspended_view(job, planning.demands(job.arrays)) for job in suspended)]
        views = [
            *self.tracker.sorted_by_arrival(known),
            *(
                self.tracker.waiting_view(name, planning.demands(group), group, now)
                for name, group in candidates.items()
            ),
        ]
        candidates |= {job.id: job.arrays for job in suspended}
        plan = self._policy.plan(views, planning.cluster, now)
        check_plan(plan, views, planning.cluster, now)
        feasible_part = feasible(plan, views, planning.cluster, self.tracker.leaving)
        draft = _Draft(wake=inf if plan.wake is None else plan.wake)
        for action in feasible_part.actions:
            self._apply(action, candidates, held, planning, draft, now)
        reasons = {refusal.job: refusal.reason for refusal in plan.refusals} | feasible_part.deferred
        for name, reason in reasons.items():
            arrays = candidates.get(name, ())  # empty for a job that holds a device: its trials do not wait
            if name in feasible_part.deferred or name in self.tracker.suspended:
                draft.deferred |= {member.trial.number: reason for array in arrays for member in array.members}
            else:
                draft.refused += [(array, reason) for array in arrays]
        return draft

    def _apply(
        self,
        action: Action,
        candidates: Mapping[str, tuple[Array, ...]],
        held: Sequence[tuple[Job, Device]],
        planning: PlanningContext,
        draft: _Draft,
        now: float,
    ) -> None:
        """Apply one action to the draft and to the job history. The engine carries out the draft."""
        match action:
            case Start() | Resume():
                device = planning.cluster.device(action.devices[0])
                arrays = candidates[action.job]
                draft.work = draft.work or WaitingWork(candidates.values(), self.tracker.group)
                known = tuple(
                    replace(x, profile=self._profiles(x.key, device.kind), later=draft.work.besides(x)) for x in arrays
                )
                resumes = action.job if isinstance(action, Resume) else ""
                demand = planning.demand(arrays, device, action.share)
                job = Job(self._new_id(), known, demand=demand, resumes=resumes)
                self.tracker.begin(job, device.name, action.share, now)
                draft.placed.append((job, device))
                self._add_helpers(job, action.devices[1:], planning, draft, now)
            case Suspend():
                draft.preemptions[action.job] = PreemptionRequest(True, "suspended by the policy")
            case Stop() if action.job in candidates:
                self.tracker.dissolve(action.job)
                reason = f"was stopped by the policy: {action.reason}"
                draft.deferred |= {m.trial.number: reason for x in candidates[action.job] for m in x.members}
                draft.wake = now  # they may start at once
            case Stop():
                draft.preemptions[action.job] = PreemptionRequest(False, f"stopped by the policy: {action.reason}")
            case Resize() if (leader := _job_at(action.devices[0], action.job, held)) is not None:
                self.tracker.set_share(action.job, action.share)
                draft.shares[action.job] = action.share
                helpers = _teams(held, self.tracker.leaving).get(leader.id, {})
                for name in helpers.keys() - set(action.devices):
                    leave = PreemptionRequest(False, f"{leader.id} goes on without {name}")
                    draft.preemptions[helpers[name]] = leave
                    self.tracker.request_preemption(helpers[name], leave, now)
                self._add_helpers(leader, [x for x in action.devices[1:] if x not in helpers], planning, draft, now)
            case Resize():
                where = " and ".join(action.devices)
                draft.preemptions[action.job] = PreemptionRequest(True, f"suspended by the policy, to move to {where}")
        if action.job in draft.preemptions:
            self.tracker.request_preemption(action.job, draft.preemptions[action.job], now)

    def _add_helpers(
        self, leader: Job, names: Sequence[str], planning: PlanningContext, draft: _Draft, now: float
    ) -> None:
        for name in names:
            device = planning.cluster.device(name)
            demand = planning.demand(leader.arrays, device, None)
            helper = Job(self._new_id(), leader.arrays, Purpose.ASSIST, demand=demand, assists=leader.id)
            self.tracker.begin(helper, name, None, now)
            draft.placed.append((helper, device))


def _teams(held: Sequence[tuple[Job, Device]], leaving: Container[str]) -> dict[str, dict[str, str]]:
    """Return id of each running job on several devices -> name of each further device -> id of the helper there."""
    leaders = {job.id for job, _ in held if job.id not in leaving}
    teams: dict[str, dict[str, str]] = {}
    for job, device in held:
        if job.assists in leaders and job.id not in leaving:
            teams.setdefault(job.assists, {})[device.name] = job.id
    return teams


def _job_at(device: str, name: str, held: Sequence[tuple[Job, Device]]) -> Job | None:
    return next((job for job, its_device in held if job.id == name and its_device.name == device), None)


def _refusal_reasons(refused: Sequence[tuple[Array, str]], joins: Mapping[str, tuple[Array, ...]]) -> dict[int, str]:
    """Return the reasons of the trials that the policy refused and that join no job, by number."""
    joining = {member.trial.number for arrays in joins.values() for array in arrays for member in array.members}
    return {
        member.trial.number: reason
        for array, reason in refused
        for member in array.members
        if member.trial.number not in joining
    }


def _measuring_reasons(
    waiting: Sequence[tuple[Member, FusionKey]], held: Sequence[tuple[Job, Device]], planning: PlanningContext
) -> dict[int, str]:
    unmeasured = [(member, key) for member, key in waiting if not planning.ready(member, key)]
    reasons = {key: planning.reason(key, held) for key in dict.fromkeys(key for _, key in unmeasured)}
    return {member.trial.number: reasons[key] for member, key in unmeasured}


def _seconds_until_free(running: Sequence[JobView]) -> dict[str, float]:
    """Return the expected seconds until each device that holds jobs is free; 0 for one that is overdue."""
    busy: dict[str, float] = {}
    for job in running:
        left = max(demand.seconds for demand in job.demand.values())
        for name in job.devices:
            busy[name] = max(busy.get(name, 0.0), left)
    return busy


class WaitingWork:
    """Counts the waiting arrays of each key and size by their epochs.

    Later rungs of single members count, too: the trials of a group that go on train `TrialGroup.work_ahead` epochs
    together, counted as members that train `epochs_ahead` epochs each. Larger arrays shrink from rung to rung, and
    compiled code is for one size.
    """

    def __init__(
        self, groups: Iterable[Sequence[Array]], group_of: Callable[[Member], TrialGroup | None] = lambda member: None
    ) -> None:
        self._arrays: defaultdict[object, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        for array in (array for arrays in groups for array in arrays if array.members):
            arrays_of_size = self._arrays[_size(array)]
            arrays_of_size[max(array.epochs)] += 1
            group = group_of(array.members[0]) if len(array.members) == 1 else None
            if group is not None and group.epochs_ahead:
                arrays_of_size[group.epochs_ahead] += group.work_ahead / group.epochs_ahead / len(group.trials)

    def besides(self, array: Array) -> Mapping[int, float]:
        """`Array.later` of one of the arrays."""
        later = dict(self._arrays[_size(array)])
        if array.members:
            later[max(array.epochs)] -= 1
        return {epochs: count for epochs, count in later.items() if count > 0}


def _size(array: Array) -> tuple[str, str, int, int]:
    """What arrays have to agree in to share compiled code."""
    return array.key.structure, array.key.data, array.key.batch_size, len(array.members)
