"""What may be expected of a plan: when its jobs end, by the costs that were measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from statistics import fmean

from shoal.core.device import Cluster, Device
from shoal.schedule.action import Plan, Resize, Resume, Start
from shoal.schedule.base import JobView

__all__ = ["PlanEstimate", "plan_estimate"]


@dataclass(frozen=True)
class PlanEstimate:
    """Expectations of a plan; inf where no job would run.

    Args:
        makespan: seconds until the last job ends.
        mean_completion: mean seconds until a job ends.
        wait: mean seconds until a job that gets no device now has one; 0 if there is none.
        rate: seconds of training alone on a device that are done in a second.
    """

    makespan: float
    mean_completion: float
    wait: float
    rate: float


@dataclass(frozen=True)
class _DeviceLoad:
    """Devices that a job has after the plan, its share of the one, and what coming there costs it, in seconds."""

    devices: tuple[Device, ...]
    share: float | None
    cost: float


@dataclass(eq=False)
class _Crowd:
    """Jobs on one device, each of which has done as much as the others while they were there together.

    Args:
        kind: of the device.
        compute: of it; 0: nobody slows anybody down, as where a job has several devices to itself.
        jobs: a heap: seconds of training that have been done when one ends, its compute, what these seconds are to
            those that it takes alone on the whole device, and whether its compute is a share that it was given.
        promised: compute of all.
        done: seconds of training that each would have behind it that is here from the start.
        now: when that was true.
    """

    kind: str
    compute: float
    jobs: list[tuple[float, float, float, bool]] = field(default_factory=list)
    promised: float = 0.0
    done: float = 0.0
    now: float = 0.0

    @property
    def stretch(self) -> float:
        """How many times as long as alone everything takes here."""
        return max(1.0, self.promised / self.compute) if self.compute > 0 else 1.0

    @property
    def next(self) -> float:
        """When the first of them ends."""
        return self.now + (self.jobs[0][0] - self.done) * self.stretch

    def begin(self, seconds: float, compute: float, factor: float, shares: bool) -> None:
        """A job comes."""
        heappush(self.jobs, (self.done + seconds * factor, compute, factor, shares))
        self.promised += compute

    def end(self) -> tuple[float, float, bool]:
        """The first of them ends; its compute, its factor, and whether it was given a share."""
        self.now, (self.done, compute, factor, shares) = self.next, self.jobs[0]
        heappop(self.jobs)
        self.promised -= compute
        return compute, factor, shares


def plan_estimate(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> PlanEstimate:
    """List scheduling (R. L. Graham, 1966) on what the plan hands out, the jobs on a device sharing its processor.

    A job that runs after the plan has to do h(w) times its seconds, h being `Scaling.factor`, and what its move costs.
    On a device on which more is promised than it has, all are that many times slower; when one ends the others become
    faster. Each job that waits follows the first one to end, the longest first, in its place. That it might not fit, or
    be given more later, is left out of account.

    Args:
        plan: to be judged.
        jobs: that it was made of; those that can run on no healthy device do not count.
        cluster: that it was made of.
    """
    devices = {device.name: device for _, device in cluster if device.healthy}
    kinds = {device.kind for device in devices.values()}
    held = _held(plan, jobs, devices)
    crowds: dict[str, _Crowd] = {}
    factors: list[tuple[float, _Crowd]] = []
    waiting: list[tuple[float, JobView]] = []
    for job in jobs:
        if place := held.get(job.id):
            device, wide = place.devices[0], len(place.devices) > 1
            alone = _Crowd(device.kind, 0.0 if wide else device.compute)
            crowd = crowds.setdefault(job.id if wide else device.name, alone)
            seconds, factor = max(job.demand[each.kind].seconds for each in place.devices), _factor(job, place)
            compute = job.demand[device.kind].compute if place.share is None else place.share
            crowd.begin(seconds + place.cost / factor, compute, factor, place.share is not None)
            factors.append((factor, crowd))
        elif able := [ask.seconds for kind, ask in job.demand.items() if kind in kinds]:
            waiting.append((min(able), job))
    if waiting and not crowds:
        return PlanEstimate(inf, inf, inf, 0.0)
    rate = sum(1 / (factor * crowd.stretch) for factor, crowd in factors)
    waiting.sort(key=lambda each: each[0])
    ends: list[float] = []
    waits: list[float] = []
    order = [(crowd.next, number, crowd) for number, crowd in enumerate(crowds.values())]
    heapify(order)
    while order:
        now, number, crowd = order[0]
        compute, factor, shares = crowd.end()
        ends.append(now)
        if waiting:
            seconds, job = waiting.pop()
            waits.append(now)
            if (ask := job.demand.get(crowd.kind)) is not None:
                seconds, compute = ask.seconds, compute if shares else ask.compute
            crowd.begin(seconds, compute, factor, shares)
        if crowd.jobs:
            heapreplace(order, (crowd.next, number, crowd))
        else:
            heappop(order)
    return PlanEstimate(max(ends, default=0.0), fmean(ends) if ends else 0.0, fmean(waits) if waits else 0.0, rate)


def _held(plan: Plan, jobs: Sequence[JobView], devices: Mapping[str, Device]) -> dict[str, _DeviceLoad]:
    """Who has what after the plan; devices that are gone or not healthy are nobody's."""
    actions = {action.job: action for action in plan.actions}
    held: dict[str, _DeviceLoad] = {}
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
        if there := tuple(devices[name] for name in names if name in devices):
            held[job.id] = _DeviceLoad(there, share, cost)
    return held


def _factor(job: JobView, place: _DeviceLoad) -> float:
    """How many times as long as on one device of its own what it has to do takes."""
    if len(place.devices) > 1:
        return job.scaling.factor(len(place.devices))
    device = place.devices[0]
    if place.share is None or not device.compute > 0:
        return 1.0
    return job.scaling.factor(min(1.0, place.share / device.compute))
