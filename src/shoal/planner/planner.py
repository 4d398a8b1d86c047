"""The planner: one turn of planning, from trials to arrays to jobs to devices."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import MappingProxyType

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.job import Job, Purpose
from shoal.planner.admission import FreeResources, admitted
from shoal.planner.families import by_family, in_turns
from shoal.planner.grouping import Grouping
from shoal.planner.job_tracker import JobTracker, PreemptionRequest
from shoal.planner.partition import Profiles, ResourceLimit, partition
from shoal.planner.planning_context import PROFILE_MEMBERS, PlanningContext, reservations
from shoal.schedule.action import Action, Resize, Resume, Start, Stop, Suspend
from shoal.schedule.base import JobView, Policy
from shoal.schedule.check import check_plan, feasible
from shoal.schedule.time_sharing import QUANTUM

__all__ = ["LEAST_SECONDS", "Placement", "Planner"]

LEAST_SECONDS = 0.005
"""Shortest time between two polls for events, even if the next turn of planning is due."""


@dataclass(frozen=True)
class Placement:
    """The result of a turn of planning: the jobs to start, and the reasons of all trials that go on waiting.

    Args:
        starts: Jobs to start, with their devices. The members of a profile job are a sample and go on waiting.
        refusals: Number of the trial -> reason, for every waiting trial that is in no training job of `starts` and
            joins no running job.
        joins: Id of a running job -> arrays that join it.
        leaves: Id of a running job -> request that it leaves its device.
        reservations: Id of a running job -> its changed reservation.
    """

    starts: tuple[tuple[Job, Device], ...]
    refusals: Mapping[int, str]
    joins: Mapping[str, tuple[Array, ...]] = field(default_factory=dict)
    leaves: Mapping[str, PreemptionRequest] = field(default_factory=dict)
    reservations: Mapping[str, Demand] = field(default_factory=dict)


@dataclass
class _Answer:
    """The feasible part of a policy's plan.

    Args:
        placed: Jobs that start.
        refused: Refused arrays, each with the reason.
        later: Number of another trial that gets no device -> reason.
        leaves: As in `Placement`.
        wake: Latest time of the next turn of planning, or inf.
    """

    placed: list[tuple[Job, Device]] = field(default_factory=list)
    refused: list[tuple[Array, str]] = field(default_factory=list)
    later: dict[int, str] = field(default_factory=dict)
    leaves: dict[str, PreemptionRequest] = field(default_factory=dict)
    wake: float = inf


class Planner:
    """Fuses waiting trials into arrays, packs arrays into jobs, and places the jobs by the policy.

    Unknown keys are profiled first. An array without a device joins a running job if that saves time. Arrays that do
    not start are cut and packed again in the next turn, from all trials that wait then. Only the history of jobs is
    kept between turns: a suspended job keeps its arrays until the policy resumes it.

    Args:
        policy: The placement policy.
        profiles: Profile of a key on a kind of device, or None.
        new_id: Source of job ids that are unique in the study.
        elastic: Whether the members of a running array can change, and can be at different epochs.
        grouping: Packing of arrays into jobs.
        fuse: Whether arrays may have several members.
        done: Epochs that trials of a key have trained in the study.
        tracker: History of the jobs of the study; by default an empty one.
    """

    def __init__(
        self,
        policy: Policy,
        profiles: Profiles,
        new_id: Callable[[], str],
        elastic: bool = True,
        grouping: Grouping | None = None,
        fuse: bool = True,
        done: Callable[[FusionKey], int] = lambda key: 0,
        tracker: JobTracker | None = None,
    ) -> None:
        self._policy = policy
        self._profiles = profiles
        self._new_id = new_id
        self._elastic = elastic
        self._grouping = grouping or Grouping()
        self._fuse = fuse
        self._done = done
        self.tracker = tracker or JobTracker(profiles)
        """History of the jobs of the study."""
        self.wake = inf
        """Latest time of the next turn of planning; inf: only after a change."""
        self._asked = 0.0

    def follow(self, policy: Policy) -> None:
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
            cluster: The current cluster.
            now: Time in seconds, for the policy.
            alone: Numbers of trials that failed in a shared job.
            unmeasurable: Pairs of key and kind of device whose profile job failed; it is not repeated.
            limits: Number of a trial that ran out of memory -> its limit.

        Raises:
            PolicyError: The policy returned an illegal plan.
        """
        together = PROFILE_MEMBERS if self._fuse else 1
        planning = PlanningContext(self._profiles, cluster, alone, unmeasurable, limits, together, self._done)
        waiting, suspended = self.tracker.look(waiting, now)
        self.tracker.end_turns(now, min(QUANTUM, now - self._asked) if now >= self.wake else QUANTUM)
        apart = alone | limits.keys()
        keyed = self._by_family(waiting, planning, unmeasurable, apart)
        profiling = self._profile_jobs(waiting, keyed, running, planning)
        held = [*running, *profiling]
        self.tracker.meet(held, now)
        views = [self.tracker.running(job, device, planning.held(job, device), now) for job, device in held]
        ready = [(member, key) for member, key in keyed if planning.ready(member, key)]
        groups = self._groups(ready, views, planning, alone, limits) if ready else []
        answer = self._ask(views, suspended, groups, planning, now)
        joins = self._joins(held, answer, planning, apart) if self._elastic and answer.refused else {}
        unready = _unready(keyed, held, planning) if len(ready) < len(keyed) else {}
        reasons = {**_refusals(answer.refused, joins), **unready, **answer.later}
        self._asked, self.wake = now, answer.wake
        return Placement(
            (*profiling, *answer.placed), reasons, joins, answer.leaves, reservations(running, joins, planning)
        )

    def _by_family(
        self,
        waiting: Sequence[tuple[Member, FusionKey]],
        planning: PlanningContext,
        unmeasurable: AbstractSet[tuple[FusionKey, str]],
        apart: AbstractSet[int],
    ) -> Sequence[tuple[Member, FusionKey]]:
        """The waiting members, with the key of their family where one partially fused array is faster."""
        if not self._fuse:
            return waiting
        kinds = {device.kind for device in planning.devices}
        pack_speed = partial(self._grouping.pack_speed, kinds=kinds)
        return by_family(waiting, self._profiles, kinds, unmeasurable, apart, pack_speed)

    def _profile_jobs(
        self,
        waiting: Sequence[tuple[Member, FusionKey]],
        keyed: Sequence[tuple[Member, FusionKey]],
        running: Sequence[tuple[Job, Device]],
        planning: PlanningContext,
    ) -> list[tuple[Job, Device]]:
        """Jobs that profile unknown keys on idle devices.

        Args:
            waiting: Waiting members with the keys of their structures.
            keyed: The same members, some with the key of their family; `waiting` itself if none has one.
            running: Jobs that hold devices.
            planning: The context of this turn.
        """
        sampled = keyed
        if keyed is not waiting:  # an array of a family is measured with members of each of its structures
            key_of = {member.trial.number: key for member, key in keyed}
            sampled = [(member, key_of[member.trial.number]) for member in in_turns(waiting)]
        samples = planning.samples(sampled, running)
        return [(Job(self._new_id(), arrays, Purpose.PROFILE), device) for arrays, device in samples]

    def _groups(
        self,
        ready: Sequence[tuple[Member, FusionKey]],
        views: Sequence[JobView],
        planning: PlanningContext,
        alone: AbstractSet[int],
        limits: Mapping[int, ResourceLimit],
    ) -> list[tuple[Array, ...]]:
        """Fuse members into arrays, and pack the arrays into groups, one per future job."""
        busy = _busy(views)
        lone = alone if self._fuse else {member.trial.number for member, _ in ready}
        arrays = partition(ready, self._profiles, planning.devices, busy, lone, self._elastic, limits)
        apart = alone | limits.keys()
        return self._grouping.groups(arrays, self._profiles, planning.devices, busy, apart, self.tracker.group)

    @property
    def sleeps(self) -> bool:
        """Whether the next turn of planning has a time, even if no event comes before it."""
        return self.wake < inf

    def patience(self, now: float, most: float) -> float:
        """Seconds to wait for events, at most `most`."""
        return min(most, max(LEAST_SECONDS, self.wake - now))

    def _joins(
        self,
        held: Sequence[tuple[Job, Device]],
        answer: _Answer,
        planning: PlanningContext,
        alone: AbstractSet[int],
    ) -> dict[str, tuple[Array, ...]]:
        """Arrays without a device that join running jobs, except jobs that are to leave their devices."""
        everyone = [(device, planning.held(job, device)) for job, device in (*held, *answer.placed)]
        free = FreeResources(planning.cluster, everyone)
        held = [(job, device) for job, device in held if device.name in free]  # the device may be lost
        held = [(job, device) for job, device in held if job.id not in self.tracker.leaving]
        arrays = [array for array, _ in answer.refused]
        return admitted(arrays, held, free, self._profiles, self._grouping, alone, self._fuse)

    def _ask(
        self,
        running: Sequence[JobView],
        suspended: Sequence[Job],
        groups: Sequence[tuple[Array, ...]],
        planning: PlanningContext,
        now: float,
    ) -> _Answer:
        """Ask the policy for a plan, and do its feasible part. Only groups that start become jobs and use an id."""
        candidates = {f"waiting-{index}": group for index, group in enumerate(groups)}
        known = [*running, *(self.tracker.off(job, planning.demands(job.arrays)) for job in suspended)]
        views = [
            *self.tracker.in_order(known),
            *(self.tracker.waiting(name, planning.demands(group), group, now) for name, group in candidates.items()),
        ]
        candidates |= {job.id: job.arrays for job in suspended}
        plan = self._policy.plan(views, planning.cluster, now)
        check_plan(plan, views, planning.cluster, now)
        doable = feasible(plan, views, planning.cluster, self.tracker.leaving)
        answer = _Answer(wake=inf if plan.wake is None else plan.wake)
        for action in doable.actions:
            self._act(action, candidates, planning, answer, now)
        reasons = {refusal.job: refusal.reason for refusal in plan.refusals} | doable.later
        for name, reason in reasons.items():
            arrays = candidates.get(name, ())  # a job that is still on its device has no waiting trials
            if name in doable.later or name in self.tracker.suspended:
                answer.later |= {member.trial.number: reason for array in arrays for member in array.members}
            else:
                answer.refused += [(array, reason) for array in arrays]
        return answer

    def _act(
        self,
        action: Action,
        candidates: Mapping[str, tuple[Array, ...]],
        planning: PlanningContext,
        answer: _Answer,
        now: float,
    ) -> None:
        """Apply one action to the answer and to the job history; the engine does the rest."""
        match action:
            case Start() | Resume():
                device = planning.cluster.device(action.devices[0])
                arrays = candidates[action.job]
                known = tuple(replace(x, profile=self._profiles(x.key, device.kind)) for x in arrays)
                resumes = action.job if isinstance(action, Resume) else ""
                demand = planning.demand(arrays, device, action.share)
                job = Job(self._new_id(), known, demand=demand, resumes=resumes, helpers=action.devices[1:])
                self.tracker.begin(job, action.devices, action.share, now)
                answer.placed.append((job, device))
            case Suspend():
                answer.leaves[action.job] = PreemptionRequest(True, "suspended by the policy")
            case Stop() if action.job in candidates:
                self.tracker.dissolve(action.job)
                reason = f"was stopped by the policy: {action.reason}"
                answer.later |= {m.trial.number: reason for x in candidates[action.job] for m in x.members}
                answer.wake = now  # they may start at once
            case Stop():
                answer.leaves[action.job] = PreemptionRequest(False, f"stopped by the policy: {action.reason}")
            case Resize() if action.devices == self.tracker.devices(action.job):
                self.tracker.reshare(action.job, action.share)
            case Resize():
                where = " and ".join(action.devices)
                answer.leaves[action.job] = PreemptionRequest(True, f"suspended by the policy, to go to {where}")
        if action.job in answer.leaves:
            self.tracker.leave(action.job, answer.leaves[action.job], now)


def _refusals(refused: Sequence[tuple[Array, str]], joins: Mapping[str, tuple[Array, ...]]) -> dict[int, str]:
    """Reasons of the trials that the policy refused and that join no job, by number."""
    joining = {member.trial.number for arrays in joins.values() for array in arrays for member in array.members}
    return {
        member.trial.number: reason
        for array, reason in refused
        for member in array.members
        if member.trial.number not in joining
    }


def _unready(
    waiting: Sequence[tuple[Member, FusionKey]], held: Sequence[tuple[Job, Device]], planning: PlanningContext
) -> dict[int, str]:
    """Reasons of the trials whose key must be measured first, by number."""
    unready = [(member, key) for member, key in waiting if not planning.ready(member, key)]
    why = {key: planning.reason(key, held) for key in dict.fromkeys(key for _, key in unready)}
    return {member.trial.number: why[key] for member, key in unready}


def _busy(running: Sequence[JobView]) -> dict[str, float]:
    """Expected seconds until each device that holds jobs is free; 0 for one that is overdue."""
    busy: dict[str, float] = {}
    for job in running:
        left = max(demand.seconds for demand in job.demand.values())
        for name in job.devices:
            busy[name] = max(busy.get(name, 0.0), left)
    return busy
