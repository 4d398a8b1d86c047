"""Estimate of a plan: expected end of its jobs, from measured costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from statistics import fmean

from shoal.core.device import Cluster, Device
from shoal.schedule.base import JobView, Plan, Resize, Resume, Start

__all__ = ["PlanEstimate", "plan_estimate"]


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
    """Jobs on one device that share its processor equally."""

    kind: str
    compute: float
    jobs: list[tuple[float, float, float, bool]] = field(default_factory=list)
    committed: float = 0.0
    done: float = 0.0
    now: float = 0.0

    @property
    def slowdown(self) -> float:
        """Slow-down of all jobs over a single job."""
        return max(1.0, self.committed / self.compute) if self.compute > 0 else 1.0

    @property
    def next(self) -> float:
        """Time at which the next job ends."""
        return self.now + (self.jobs[0][0] - self.done) * self.slowdown

    def begin(self, seconds: float, compute: float, factor: float, has_share: bool) -> None:
        """Add a job."""
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
    ignored.

    Args:
        plan: The plan.
        jobs: Jobs given to the policy; jobs that can run on no healthy device do not count.
        cluster: Cluster given to the policy.
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
