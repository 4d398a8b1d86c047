"""The automatic policy: shares devices, takes turns, or spreads jobs, whichever is expected to be best."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from statistics import fmean
from typing import Final, final

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.errors import PolicyError
from shoal.core.resources import ROUNDING, Ledger
from shoal.plan.schedule.base import JobState, JobView, Plan, Policy, Resize, Resume, Start
from shoal.plan.schedule.completion_times import CompletionTimes
from shoal.plan.schedule.expected_finish import ExpectedFinish
from shoal.plan.schedule.growth import fill_up_idle, give_back, on_first_device
from shoal.plan.schedule.knapsack import WFD, DeviceOrder, JobOrder, Knapsack
from shoal.plan.schedule.refusals import Refusals, start_or_resume
from shoal.plan.schedule.water_filling import WaterFilling

__all__ = ["OBJECTIVES", "Auto", "PlanEstimate", "SpaceSharing", "check_objective", "plan_estimate"]

OBJECTIVES: Final[Mapping[str, str]] = {
    "makespan": "makespan",
    "mean_completion": "mean completion",
    "time_to_target": "time to target",
    "time_to_good": "time to good trials",
}
"""Objectives and their titles, all minimised: the end of the last job, the mean end of a job, the time until trials
reach a target, or the mean time until the good trials of a study are nearly as good as they get."""

_TAKES_TURNS = ("time_to_target", "time_to_good")
"""Objectives for which the losses of trials decide which trial trains next."""

_LARGE = 50_000
"""Jobs times devices above which jobs are packed by a knapsack policy; below it comparing plans takes a few
milliseconds."""


def check_objective(objective: str) -> None:
    """Check the name of an objective."""
    if objective not in OBJECTIVES:
        raise PolicyError(f"`objective` must be one of {', '.join(OBJECTIVES)}, got {objective!r}")


@final
@dataclass(frozen=True)
class Auto(Policy):
    """Runs one policy for each division of devices, and returns the plan with the best estimate by the objective.

    1. Sharing (HyperSack): jobs side by side, see `SpaceSharing`. It moves no job, and is always a candidate.
    2. Growing (Fluid): the widths of `WaterFilling`, if jobs have a measured scaling beyond their demand.
    3. Taking turns (Hermes): the time-sharing policy, if the objective is the time to a target or to good trials, jobs
       wait, and the mean wait is longer than a switch takes. The value of a trial shows in its losses, which the
       estimate does not include; so turns need only keep the devices as busy as the better of the other two plans.
    4. Filling up (Fluid): a device that no job needs after that goes to a running job, where a device more was measured
       to pay, or was not measured yet; see `fill_up_idle`. While jobs wait, running jobs count as being on their first
       devices only: they give the others back where a waiting job is placed.

    Plans are compared by their `PlanEstimate`, from measured demands, scalings and costs of moves; the time to a target
    or to good trials is judged by mean completion. A plan that moves jobs must gain more than the moves cost. The first
    plan wins a tie.

    In a live study, a job whose sharing was never measured scales as far as its measured demand leaves room for others
    of its kind on one device. `SpaceSharing` uses the same demand, and may commit more compute than a device has. With
    more than 50,000 pairs of a job and a device, jobs are packed by worst fit, the longest or the shortest first.

    One plan applies to all jobs. If only some jobs have a measured scaling, either all share or none does.

    If the work cannot end before the deadline of the study, however well it is packed, the makespan is of no use: the
    mean completion takes its place, so that most jobs end in time.

    Args:
        objective: One of `OBJECTIVES`.
        turns: The time-sharing policy; None: no turns are taken.
        deadline: Time at which the study's timeout expires, in seconds.

    Raises:
        PolicyError: There is no such objective.
    """

    objective: str = "makespan"
    turns: Policy | None = field(default_factory=ExpectedFinish)
    deadline: float = inf

    def __post_init__(self) -> None:
        check_objective(self.objective)

    @property
    def needs_losses(self) -> bool:  # type: ignore[override]  # of other policies it is a constant
        """Whether the turns compare losses, and the objective lets jobs take turns."""
        return self.objective in _TAKES_TURNS and self.turns is not None and self.turns.needs_losses

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        has_deadline = self.objective == "makespan" and self.deadline < inf
        if has_deadline and _least_seconds(jobs, cluster) > self.deadline - now:
            return replace(self, objective="mean_completion").plan(jobs, cluster, now)
        if self.is_large(len(jobs), cluster):
            return self.large_scale_policy(cluster).plan(jobs, cluster, now)
        return fill_up_idle(self._divided(jobs, cluster, now), jobs, cluster)

    def _divided(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Return the best plan of sharing, growing and taking turns."""
        waits = any(job.state is not JobState.RUNNING for job in jobs)
        seen = [on_first_device(job, cluster) for job in jobs] if waits else jobs
        space_sharing = SpaceSharing(largest_first=self.objective == "makespan")
        best = give_back(space_sharing.plan(seen, cluster, now), jobs, cluster)
        turns = self._time_sharing(jobs)
        oversubscribed = any(device.capacity > device.compute for _, device in cluster)
        grows = any(_has_measured_scaling(job, oversubscribed=oversubscribed) for job in jobs)
        if not grows and turns is None:
            return best
        expected = plan_estimate(best, jobs, cluster)
        if grows:
            widths = WaterFilling().plan([_on_one_cpu_slot(job) for job in seen], cluster, now)
            grown = give_back(widths, jobs, cluster)
            grown_estimate = plan_estimate(grown, jobs, cluster)
            if self._value(grown_estimate) < self._value(expected):
                best, expected = grown, grown_estimate
        if turns is not None and expected.wait > max(job.switch_seconds for job in jobs):
            turn_plan = turns.plan(jobs, cluster, now)
            if plan_estimate(turn_plan, jobs, cluster).rate >= expected.rate * (1 - ROUNDING):
                best = turn_plan
        return best

    def with_deadline(self, deadline: float) -> "Auto":
        """Return the policy with another deadline."""
        return replace(self, deadline=deadline)

    def turn(self, job: JobView) -> float:
        """Return the seconds of a turn under the time-sharing policy, if there is one."""
        return super().turn(job) if self.turns is None else self.turns.turn(job)

    def large_scale_policy(self, cluster: Cluster) -> Policy:
        """Return the policy for large numbers of jobs and devices."""
        largest_first = self.objective == "makespan"
        if len({device.kind for _, device in cluster if device.healthy}) > 1:
            return SpaceSharing(largest_first)
        return WFD() if largest_first else _ShortestWorstFit()

    def is_large(self, jobs: int, cluster: Cluster) -> bool:
        """Return whether the number of jobs times devices is above the limit."""
        return jobs * sum(len(node.devices) for node in cluster.nodes) > _LARGE

    def _time_sharing(self, jobs: Sequence[JobView]) -> Policy | None:
        """Return the time-sharing policy, if it has a choice of jobs to run."""
        waits = any(job.state is not JobState.RUNNING for job in jobs)
        if self.objective not in _TAKES_TURNS or not waits or not any(job.preemptible for job in jobs):
            return None
        return self.turns

    def _value(self, expected: "PlanEstimate") -> tuple[float, float]:
        """Return the value of an estimate, less is better; the second number breaks ties."""
        if self.objective == "makespan":
            return expected.makespan, expected.mean_completion
        return expected.mean_completion, expected.makespan


def _least_seconds(jobs: Sequence[JobView], cluster: Cluster) -> float:
    """Return a lower bound on the seconds until all jobs end: their least work, spread evenly over all devices."""
    compute = sum(device.compute for _, device in cluster if device.healthy)
    work = sum(min((ask.seconds * ask.compute for ask in job.demand.values()), default=0.0) for job in jobs)
    return work / compute if compute > 0 else 0.0


@final
class _ShortestWorstFit(Knapsack):
    """Place the shortest job first, each on the device with the most remaining compute."""

    jobs = JobOrder.SHORTEST
    devices = DeviceOrder.WORST_FIT


def _has_measured_scaling(job: JobView, *, oversubscribed: bool) -> bool:
    """Return whether the job has a scaling beyond its demand, by which jobs share at no cost up to a whole device; or
    holds a share that measurements may take back."""
    if job.scaling.devices > 1 or oversubscribed:
        return job.scaling.devices > 1
    if job.share is not None:
        return True
    max_jobs = job.scaling.max_jobs
    exceeds_device = max_jobs * max((ask.compute for ask in job.demand.values()), default=0.0) > 1 + ROUNDING
    return max_jobs > 1 and (job.scaling.alpha > 1 or exceeds_device)


def _on_one_cpu_slot(job: JobView) -> JobView:
    """Return the view of a job that `WaterFilling` neither grows nor shrinks if it can only run on CPU slots."""
    if job.scaling.max_devices == 1 or not all(kind.startswith("cpu/") for kind in job.demand):
        return job
    scaling = replace(job.scaling, devices=max(1, len(job.devices)), grows=False)
    return replace(job, scaling=scaling, preemptible=job.preemptible and len(job.devices) == 1)


_ResourceKey = tuple[tuple[str, float, int, float], ...]
"""Kind of device, compute, memory and cores, for every kind that a job runs on."""


@final
@dataclass(frozen=True)
class SpaceSharing(Policy):
    """Places jobs side by side, in the order of their work, each on the device where it is expected to end first.

    - The work of a job is compute times seconds on its fastest kind of device in the cluster. For the makespan the
      largest work goes first, so that small jobs even out the end (LPT; R. L. Graham, 1969); the critical path of a job
      replaces its work if it is longer (T. C. Hu, 1961). For the mean completion the smallest work goes first (W. E.
      Smith, 1956).
    - The device with room is the one on which the job is expected to end first; see `CompletionTimes`. So on devices of
      one kind this is worst fit; of several kinds the fastest is shared until that costs as much as a slower one.
    - Of several kinds, a job waits for a busy device of a faster kind if it is expected to end clearly sooner there. It
      has waited enough after as many seconds as it takes on the device with room: however wrong an estimate is, no job
      waits longer than it would have run.

    Capacity, memory, cores, and running and suspended jobs are treated as by the knapsack policies.

    Args:
        largest_first: Whether the largest work goes first, or the smallest.
    """

    largest_first: bool = True

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        times = CompletionTimes(Ledger(cluster, jobs), jobs)
        waiting = [job for job in jobs if job.state is not JobState.RUNNING]
        demands = {id(job.demand): job.demand for job in waiting}
        fastest = {key: _on_fastest_kind(demand, times.kinds) for key, demand in demands.items()}
        resource_keys = {key: _resource_key(demand) for key, demand in demands.items()}
        unplaceable: set[_ResourceKey] = set()
        actions: list[Start | Resume] = []
        waits: dict[str, str] = {}
        for job in sorted(waiting, key=lambda job: self._rank(job, *fastest[id(job.demand)])):
            resources = resource_keys[id(job.demand)]
            free = None if resources in unplaceable else times.first_free(job)
            if free is None:
                unplaceable.add(resources)
                times.refuse(job.demand)
                continue
            has_waited_longer = now - job.since >= free.end
            faster = None if has_waited_longer else times.first_faster(job, free)
            if faster is None:
                times.take(job, free.capacity)
                actions.append(start_or_resume(job, free.capacity))
            else:
                times.reserve(job.demand, faster)
                waits[job.id] = _wait_text(faster.capacity.device, free.capacity.device)
        refused = len(waiting) - len(actions)
        return Plan(tuple(actions), Refusals(refused, lambda: jobs, actions, cluster, waits=waits))

    def _rank(self, job: JobView, seconds: float, compute: float) -> float:
        """Return the sort key of a job."""
        work = seconds * compute
        return -max(work, job.critical_path) if self.largest_first else work


def _on_fastest_kind(demand: Mapping[str, Demand], kinds: Collection[str]) -> tuple[float, float]:
    return min(((ask.seconds, ask.compute) for kind, ask in demand.items() if kind in kinds), default=(0.0, 0.0))


def _resource_key(demand: Mapping[str, Demand]) -> _ResourceKey:
    return tuple((kind, ask.compute, ask.memory, ask.cores) for kind, ask in demand.items())


def _wait_text(faster: Device, free: Device) -> str:
    return (
        f"waits for {faster.name} ({faster.kind}), where it is expected to end sooner than on {free.name} ({free.kind})"
    )


@dataclass(frozen=True)
class PlanEstimate:
    """Expected times of a plan; inf if no job would run.

    Args:
        makespan: Seconds until the last job ends.
        mean_completion: Mean seconds until a job ends.
        wait: Mean seconds until a waiting job gets a device; 0 if no job waits.
        rate: Seconds of training alone on a device that are done per second.
    """

    makespan: float
    mean_completion: float
    wait: float
    rate: float


@dataclass(frozen=True)
class _DeviceLoad:
    """Devices of a job after the plan, its share of a single device, and the cost of its move in seconds."""

    devices: tuple[Device, ...]
    share: float | None
    cost: float


@dataclass(eq=False)
class _SharedDevice:
    """Jobs on one device that share its processor equally.

    Args:
        compute: Compute of the device; 0: no slowdown, for a job with several devices of its own.
        jobs: Heap of jobs: `done` at the end of the job, its compute, its seconds over those alone on the whole device,
            and whether its compute is a given share.
        done: Seconds of training of a job that was present from the start.
    """

    kind: str
    compute: float
    jobs: list[tuple[float, float, float, bool]] = field(default_factory=list)
    committed: float = 0.0
    done: float = 0.0
    now: float = 0.0

    @property
    def slowdown(self) -> float:
        return max(1.0, self.committed / self.compute) if self.compute > 0 else 1.0

    @property
    def next(self) -> float:
        """Time at which the next job ends."""
        return self.now + (self.jobs[0][0] - self.done) * self.slowdown

    def begin(self, seconds: float, compute: float, factor: float, has_share: bool) -> None:
        heappush(self.jobs, (self.done + seconds * factor, compute, factor, has_share))
        self.committed += compute

    def end(self) -> tuple[float, float, bool]:
        """End the next job, and return its compute, its factor, and whether it had a given share."""
        self.now, (self.done, compute, factor, has_share) = self.next, self.jobs[0]
        heappop(self.jobs)
        self.committed -= compute
        return compute, factor, has_share


def plan_estimate(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> PlanEstimate:
    """Estimate a plan by list scheduling (R. L. Graham, 1966), with the jobs on a device sharing its processor.

    A job that runs after the plan takes h(w) times its seconds, with h = `Scaling.factor`, plus the cost of its move.
    On an overcommitted device all jobs slow down in proportion; when one ends the others speed up. Each waiting job,
    the longest first, takes the place of the next job to end. Whether it fits, or gets more resources later, is
    ignored, and so are jobs that can run on no healthy device.
    """
    devices = {device.name: device for _, device in cluster if device.healthy}
    kinds = {device.kind for device in devices.values()}
    loads = _loads_after(plan, jobs, devices)
    shared_devices: dict[str, _SharedDevice] = {}
    factors: list[tuple[float, _SharedDevice]] = []
    waiting: list[tuple[float, JobView]] = []
    for job in jobs:
        if load := loads.get(job.id):
            device, is_multi_device = load.devices[0], len(load.devices) > 1
            alone = _SharedDevice(device.kind, 0.0 if is_multi_device else device.compute)
            shared = shared_devices.setdefault(job.id if is_multi_device else device.name, alone)
            seconds, factor = max(job.demand[each.kind].seconds for each in load.devices), _factor(job, load)
            compute = job.demand[device.kind].compute if load.share is None else load.share
            shared.begin(seconds + load.cost / factor, compute, factor, load.share is not None)
            factors.append((factor, shared))
        elif run_seconds := [ask.seconds for kind, ask in job.demand.items() if kind in kinds]:
            waiting.append((min(run_seconds), job))
    if waiting and not shared_devices:
        return PlanEstimate(inf, inf, inf, 0.0)
    rate = sum(1 / (factor * shared.slowdown) for factor, shared in factors)
    waiting.sort(key=lambda each: each[0])
    ends: list[float] = []
    waits: list[float] = []
    order = [(shared.next, number, shared) for number, shared in enumerate(shared_devices.values())]
    heapify(order)
    while order:
        now, number, shared = order[0]
        compute, factor, has_share = shared.end()
        ends.append(now)
        if waiting:
            seconds, job = waiting.pop()
            waits.append(now)
            if (ask := job.demand.get(shared.kind)) is not None:
                seconds, compute = ask.seconds, compute if has_share else ask.compute
            shared.begin(seconds, compute, factor, has_share)
        if shared.jobs:
            heapreplace(order, (shared.next, number, shared))
        else:
            heappop(order)
    return PlanEstimate(max(ends, default=0.0), fmean(ends) if ends else 0.0, fmean(waits) if waits else 0.0, rate)


def _loads_after(plan: Plan, jobs: Sequence[JobView], devices: Mapping[str, Device]) -> dict[str, _DeviceLoad]:
    """Return the devices of each job after the plan, without removed and unhealthy devices."""
    actions = {action.job: action for action in plan.actions}
    loads: dict[str, _DeviceLoad] = {}
    for job in jobs:
        names, share, cost = job.devices, job.share, 0.0
        if (action := actions.get(job.id)) is not None:
            if not isinstance(action, (Start, Resume, Resize)):
                continue
            names, share = action.devices, action.share
            if isinstance(action, Resume):
                cost = job.switch_seconds
            elif isinstance(action, Resize):
                cost = job.scaling.resize_seconds
        if present := tuple(devices[name] for name in names if name in devices):
            loads[job.id] = _DeviceLoad(present, share, cost)
    return loads


def _factor(job: JobView, load: _DeviceLoad) -> float:
    """Return the time of a job on its devices over its time alone on one device."""
    if len(load.devices) > 1:
        return job.scaling.factor(len(load.devices))
    device = load.devices[0]
    if load.share is None or not device.compute > 0:
        return 1.0
    return job.scaling.factor(min(1.0, load.share / device.compute))
