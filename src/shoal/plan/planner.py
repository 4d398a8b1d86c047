"""The plan: one turn of planning, from waiting trials to arrays to jobs to devices, as a pure function."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from math import inf
from types import MappingProxyType

from shoal.core.array import Array
from shoal.core.device import Cluster, Device
from shoal.core.job import Job, Purpose, job_id
from shoal.core.resources import Ledger, Share
from shoal.core.trial import TrialGroup
from shoal.plan.admission import admit
from shoal.plan.cache import PlanCache
from shoal.plan.families import by_family
from shoal.plan.job_tracker import PreemptionRequest
from shoal.plan.partition import partition
from shoal.plan.plan_input import Placement, PlanInput
from shoal.plan.planning_context import PlanningContext, reservations
from shoal.plan.schedule.base import Action, JobView, Resize, Resume, Start, Stop, Suspend
from shoal.plan.schedule.check import check_plan, feasible
from shoal.plan.shares import limit_placed, restarted_alone
from shoal.plan.views import JobViews
from shoal.plan.waiting import WaitingClass

__all__ = ["WaitingWork", "plan"]


@dataclass
class _Draft:
    placed: list[tuple[Job, Device]] = field(default_factory=list)
    refused: list[tuple[Array, str]] = field(default_factory=list)
    deferred: dict[int, str] = field(default_factory=dict)
    shares: dict[str, float | None] = field(default_factory=dict)
    preemptions: dict[str, PreemptionRequest] = field(default_factory=dict)
    wake: float = inf


def plan(given: PlanInput, cache: PlanCache | None = None) -> Placement:
    """Fuse waiting trials into arrays, pack arrays into jobs, and place the jobs by the policy.

    Keys without a profile are profiled first, each on an idle device of every kind. An array without a device joins a
    running job if that saves time. Arrays that do not start are discarded: the next plan fuses and packs all trials
    that wait then. A suspended job keeps its arrays until the policy resumes it.

    Equal arguments have equal results, and nothing that is given is changed but the cache, on which no result depends.

    Args:
        cache: What earlier plans have computed; None: nothing.

    Raises:
        PolicyError: The policy has returned an illegal plan.
    """
    return _Planning(given, cache or PlanCache()).plan()


class _Planning:
    """One turn of planning. It changes its own copy of the history."""

    def __init__(self, given: PlanInput, cache: PlanCache) -> None:
        self.given = given
        self.history = given.history.copy()
        self.suspended = [job for job, _ in given.history.suspended.values()]
        self.cache = cache
        cache.refresh((given.costs, given.costs.version, given.history.switch_seconds, _devices(given.cluster)))
        self.views = JobViews(given, self.history, cache)
        self.context = PlanningContext(given, cache)
        self.draft = _Draft()
        self.numbers = count(given.next_job)
        self.needs_own_job = given.own_job_trials | given.oom_limits.keys()

    def plan(self) -> Placement:
        given, context, draft = self.given, self.context, self.draft
        waiting = self._with_family_keys()
        profiling = [
            (Job(self._new_id(), arrays, Purpose.PROFILE, compute_limit=limit), device)
            for arrays, device, limit in context.to_profile(waiting, given.running)
        ]
        held = [*given.running, *profiling]
        self.history.register_running(held, given.now, self.views.arrived)
        running = self._running_views(held)
        ready: list[WaitingClass] = []
        unmeasured: list[WaitingClass] = []
        for each in waiting:
            (ready if context.ready(each) else unmeasured).append(each)
        ready, held_back = self._within_limit(ready)
        packs, behind = self._packs(ready, running)
        self._run_policy(running, packs, behind, held)
        draft.placed = limit_placed(draft.placed, held, given.can_limit_compute)
        for name, request in restarted_alone(held, draft.placed, running).items():
            if name not in draft.preemptions:
                self._request_preemption(name, request)
        joins = self._joins(held, behind) if given.elastic and draft.refused else {}
        measuring = self._measuring_reasons(unmeasured, held)
        return Placement(
            starts=(*profiling, *draft.placed),
            refusals={**_refusal_reasons(draft.refused, joins), **measuring, **draft.deferred},
            joins=joins,
            preemptions=draft.preemptions,
            reservations=reservations(given.running, joins, context, draft.shares),
            history=self.history,
            next_job=next(self.numbers),
            wake=draft.wake,
            held_back=held_back,
        )

    def _new_id(self) -> str:
        return job_id(next(self.numbers))

    def _request_preemption(self, job: str, request: PreemptionRequest) -> None:
        self.draft.preemptions[job] = request
        self.history.request_preemption(job, request, self.given.now)

    def _with_family_keys(self) -> Sequence[WaitingClass]:
        """Return the waiting trials, with the key of their family where one partially fused array is faster."""
        given, kinds = self.given, {device.kind for device in self.context.devices}
        if not given.fuse:
            return given.waiting
        relative_time = partial(given.packer.relative_time, kinds=kinds)
        return by_family(given.waiting, given.costs, kinds, given.unmeasurable, relative_time)

    def _within_limit(self, ready: Sequence[WaitingClass]) -> tuple[list[WaitingClass], bool]:
        """Return the trials that may start within `PlanInput.max_concurrent`, and whether others are held back.

        A whole class comes before the next one, so that arrays are as large as the limit allows.
        """
        if self.given.max_concurrent is None:
            return list(ready), False
        jobs = [*(job for job, _ in self.given.running if job.purpose is Purpose.TRAIN), *self.suspended]
        free = max(0, self.given.max_concurrent - sum(len(job.members) for job in jobs))
        earlier = accumulate((len(each.members) for each in ready), initial=0)
        within = [(x, x.members[: max(0, free - before)]) for x, before in zip(ready, earlier, strict=False)]
        held_back = any(len(members) < len(each.members) for each, members in within)
        return [replace(each, members=members) for each, members in within if members], held_back

    def _running_views(self, held: Sequence[tuple[Job, Device]]) -> list[JobView]:
        """Return the views of all jobs that hold devices; helpers that do not make steps faster are to leave.

        A helper is one more device of its leader. A helper that is about to leave has a view of its own until then.
        """
        teams = _teams(held, self.history.leaving)
        views: list[JobView] = []
        dismissed: set[str] = set()
        for job, device in held:
            if job.purpose is Purpose.ASSIST:
                continue
            helpers = teams.get(job.id, {})
            view = self._running_view(job, device, tuple(helpers))
            for name in view.devices[view.scaling.max_devices :]:
                reason = f"steps of {job.id} are not faster on {len(view.devices)} devices"
                dismissed.add(helpers[name])
                self._request_preemption(helpers[name], PreemptionRequest(False, reason))
            views.append(replace(view, devices=view.devices[: view.scaling.max_devices]) if helpers else view)
        in_team = {helper for team in teams.values() for helper in team.values()} - dismissed
        leaving = [each for each in held if each[0].purpose is Purpose.ASSIST and each[0].id not in in_team]
        return [*views, *(self._running_view(job, device, ()) for job, device in leaving)]

    def _running_view(self, job: Job, device: Device, further: tuple[str, ...]) -> JobView:
        """The view of a running job, whose turn ends if it has lasted as long as the policy says."""
        demand, now = self.context.running_demand(job, device), self.given.now
        view = self.views.running(job, device, demand, further)
        if view.preemptible and self.given.policy.turn_is_over(view, now):
            self.history.end_turn(job.id, now)
            view = self.views.running(job, device, demand, further)
        return view

    def _packs(
        self, ready: Sequence[WaitingClass], running: Sequence[JobView]
    ) -> tuple[list[tuple[Array, ...]], list[tuple[Array, float]]]:
        """Return the arrays of the trials, one pack per job, and the arrays behind them; see `CutArrays`."""
        if not ready:
            return [], []
        given, devices, busy = self.given, self.context.devices, _seconds_until_free(running)
        cut = partition(ready, given.costs, devices, busy, given.elastic, given.fuse, self.cache)
        packs = given.packer.packs(cut.arrays, given.costs, devices, busy, self.needs_own_job, given.trial_groups)
        return packs, cut.behind

    def _run_policy(
        self,
        running: Sequence[JobView],
        packs: Sequence[tuple[Array, ...]],
        behind: Sequence[tuple[Array, float]],
        held: Sequence[tuple[Job, Device]],
    ) -> None:
        """Ask the policy for a plan, and apply its feasible part. Only packs that start become jobs with an id."""
        given, context, draft, cluster = self.given, self.context, self.draft, self.given.cluster
        waiting_packs = {f"waiting-{index}": pack for index, pack in enumerate(packs)}
        suspended = [self.views.suspended(job, context.demands(job.arrays)) for job in self.suspended]
        views = [
            *self.views.by_arrival([*running, *suspended]),
            *(self.views.waiting(name, context.demands(pack), pack) for name, pack in waiting_packs.items()),
        ]
        waiting_packs |= {job.id: job.arrays for job in self.suspended}
        plan = given.policy.plan(views, cluster, given.now)
        check_plan(plan, views, cluster, given.now)
        feasible_part = feasible(plan, views, cluster, self.history.leaving)
        draft.wake = inf if plan.wake is None else plan.wake
        if feasible_part.actions:
            work = WaitingWork(waiting_packs.values(), behind, given.trial_groups)
            for action in feasible_part.actions:
                self._apply(action, waiting_packs, work, held)
        reasons = {refusal.job: refusal.reason for refusal in plan.refusals} | feasible_part.deferred
        for name, reason in reasons.items():
            arrays = waiting_packs.get(name, ())  # empty for a job that holds a device: its trials do not wait
            if name in feasible_part.deferred or name in self.history.suspended:
                draft.deferred |= {member.trial.number: reason for array in arrays for member in array.members}
            else:
                draft.refused += [(array, reason) for array in arrays]

    def _apply(
        self,
        action: Action,
        waiting_packs: Mapping[str, tuple[Array, ...]],
        work: "WaitingWork",
        held: Sequence[tuple[Job, Device]],
    ) -> None:
        """Apply one action to the draft and to the history."""
        draft, now = self.draft, self.given.now
        match action:
            case Start() | Resume():
                self._start(action, waiting_packs[action.job], work)
            case Suspend():
                self._request_preemption(action.job, PreemptionRequest(True, "suspended by the policy"))
            case Stop() if action.job in waiting_packs:
                self.history.dissolve(action.job)
                reason = f"was stopped by the policy: {action.reason}"
                draft.deferred |= {m.trial.number: reason for x in waiting_packs[action.job] for m in x.members}
                draft.wake = now  # they may start at once
            case Stop():
                self._request_preemption(
                    action.job, PreemptionRequest(False, f"stopped by the policy: {action.reason}")
                )
            case Resize() if (leader := _job_at(action.devices[0], action.job, held)) is not None:
                self._resize(action, leader, held)
            case Resize():
                where = " and ".join(action.devices)
                self._request_preemption(
                    action.job, PreemptionRequest(True, f"suspended by the policy, to move to {where}")
                )

    def _start(self, action: Start | Resume, arrays: Sequence[Array], work: "WaitingWork") -> None:
        device = self.given.cluster.device(action.devices[0])
        known = tuple(
            replace(
                array,
                profile=self.given.costs.profile(array.key, device.kind),
                later=work.besides(array),
            )
            for array in arrays
        )
        resumes = action.job if isinstance(action, Resume) else ""
        demand = self.context.demand(arrays, device, action.share)
        job = Job(self._new_id(), known, demand=demand, resumes=resumes)
        self.history.begin(job, device.name, action.share, self.given.now, self.views.arrived(arrays))
        self.draft.placed.append((job, device))
        self._add_helpers(job, action.devices[1:])

    def _resize(self, action: Resize, leader: Job, held: Sequence[tuple[Job, Device]]) -> None:
        self.history.set_share(action.job, action.share)
        self.draft.shares[action.job] = action.share
        helpers = _teams(held, self.history.leaving).get(leader.id, {})
        for name in [name for name in helpers if name not in action.devices]:
            self._request_preemption(helpers[name], PreemptionRequest(False, f"{leader.id} continues without {name}"))
        self._add_helpers(leader, [x for x in action.devices[1:] if x not in helpers])

    def _add_helpers(self, leader: Job, names: Sequence[str]) -> None:
        for name in names:
            device = self.given.cluster.device(name)
            demand = self.context.demand(leader.arrays, device, None)
            helper = Job(self._new_id(), leader.arrays, Purpose.ASSIST, demand=demand, assists=leader.id)
            self.history.begin(helper, name, None, self.given.now)
            self.draft.placed.append((helper, device))

    def _joins(
        self, held: Sequence[tuple[Job, Device]], behind: Sequence[tuple[Array, float]]
    ) -> dict[str, tuple[Array, ...]]:
        """Return the arrays without a device that join running jobs, except jobs that are to leave their devices."""
        given, free = self.given, Ledger(self.given.cluster)
        for job, device in (*held, *self.draft.placed):
            if device.name in free:
                demand = self.context.running_demand(job, device)
                free.add(job.id, free[device.name], Share(memory=demand.memory, cores=demand.cores))
        hosts = [
            (job, device)
            for job, device in held
            if device.name in free and free[device.name].device.healthy and job.id not in self.history.leaving
        ]
        arrays = [array for array, _ in self.draft.refused]
        return admit(arrays, hosts, free, given.costs, given.packer, self.needs_own_job, given.fuse, behind)

    def _measuring_reasons(
        self, unmeasured: Sequence[WaitingClass], held: Sequence[tuple[Job, Device]]
    ) -> dict[int, str]:
        reasons = {key: self.context.reason(key, held) for key in {each.fused_key for each in unmeasured}}
        return {member.trial.number: reasons[each.fused_key] for each in unmeasured for member in each.members}


def _devices(cluster: Cluster) -> object:
    """Return a value that is equal for clusters on which trials cost the same."""
    return tuple([(x.kind, x.memory, x.capacity, x.cores) for _, x in cluster if x.healthy])


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

    Includes later rungs of the members: the trials of a TrialGroup that continue train `TrialGroup.work_ahead` epochs
    together, counted as members that train `epochs_ahead` epochs each. Larger arrays shrink from rung to rung, and
    compiled code is for one size.
    """

    def __init__(
        self,
        jobs: Iterable[Sequence[Array]],
        behind: Sequence[tuple[Array, float]] = (),
        trial_groups: Mapping[int, TrialGroup] = MappingProxyType({}),
    ) -> None:
        self._arrays: defaultdict[object, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        for array, times in [*((array, 1.0) for arrays in jobs for array in arrays if array.members), *behind]:
            arrays_of_size = self._arrays[_size(array)]
            arrays_of_size[max(array.epochs)] += times
            group = trial_groups.get(array.members[0].trial.number) if len(array.members) == 1 else None
            if group is not None and group.epochs_ahead:
                more = times * group.work_ahead / group.epochs_ahead / len(group.trials)
                arrays_of_size[group.epochs_ahead] += more

    def besides(self, array: Array) -> Mapping[int, float]:
        """`Array.later` of one of the arrays."""
        later = dict(self._arrays[_size(array)])
        if array.members:
            later[max(array.epochs)] -= 1
        return {epochs: count for epochs, count in later.items() if count > 0}


def _size(array: Array) -> tuple[str, str, int, int]:
    """What arrays have to agree in to share compiled code."""
    return array.key.structure, array.key.data, array.key.batch_size, len(array.members)
