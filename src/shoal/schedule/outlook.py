"""What may be expected of a plan: when its jobs end, by the costs that were measured."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf
from statistics import fmean

from shoal.core.device import Cluster, Device
from shoal.schedule.action import Plan, Resize, Resume, Start
from shoal.schedule.base import JobView

__all__ = ["Outlook", "outlook"]


@dataclass(frozen=True)
class Outlook:
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
class _Held:
    """Devices that a job has after the plan, its share of the one, and what coming there costs it, in seconds."""

    devices: tuple[Device, ...]
    share: float | None
    cost: float


def outlook(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> Outlook:
    """List scheduling (R. L. Graham, 1966) on what the plan hands out, as if that stayed as it is.

    A job that runs after the plan ends after what its move costs and seconds · h(w) · max(1, promised / compute) of its
    device, h being `Scaling.factor`. Each job that waits follows the first one to end, the longest first, and takes as
    many times its seconds there. That it might not fit, or be given more later, is left out of account.

    Args:
        plan: to be judged.
        jobs: that it was made of; those that can run on no healthy device do not count.
        cluster: that it was made of.
    """
    devices = {device.name: device for _, device in cluster if device.healthy}
    kinds = {device.kind for device in devices.values()}
    held = _held(plan, jobs, devices)
    promised: dict[str, float] = defaultdict(float)
    for job in jobs:
        if (place := held.get(job.id)) and len(place.devices) == 1:
            device = place.devices[0]
            promised[device.name] += job.demand[device.kind].compute if place.share is None else place.share
    ends: list[float] = []
    places: list[tuple[float, float]] = []
    waiting: list[float] = []
    rate = 0.0
    for job in jobs:
        if job.id in held:
            place = held[job.id]
            stretch = _stretch(job, place, promised)
            ends.append(place.cost + stretch * max(job.demand[device.kind].seconds for device in place.devices))
            places.append((ends[-1], stretch))
            rate += 1 / stretch
        elif able := [ask.seconds for kind, ask in job.demand.items() if kind in kinds]:
            waiting.append(min(able))
    if waiting and not places:
        return Outlook(inf, inf, inf, 0.0)
    heapify(places)
    waits: list[float] = []
    for seconds in sorted(waiting, reverse=True):
        free, stretch = places[0]
        waits.append(free)
        ends.append(free + stretch * seconds)
        heapreplace(places, (ends[-1], stretch))
    return Outlook(max(ends, default=0.0), fmean(ends) if ends else 0.0, fmean(waits) if waits else 0.0, rate)


def _held(plan: Plan, jobs: Sequence[JobView], devices: Mapping[str, Device]) -> dict[str, _Held]:
    """Who has what after the plan; devices that are gone or not healthy are nobody's."""
    actions = {action.job: action for action in plan.actions}
    held: dict[str, _Held] = {}
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
            held[job.id] = _Held(there, share, cost)
    return held


def _stretch(job: JobView, place: _Held, promised: Mapping[str, float]) -> float:
    """How many times as long as alone on one device the job takes."""
    if len(place.devices) > 1:
        return job.scaling.factor(len(place.devices))
    device = place.devices[0]
    if not device.compute > 0:
        return 1.0
    width = 1.0 if place.share is None else min(1.0, place.share / device.compute)
    return job.scaling.factor(width) * max(1.0, promised[device.name] / device.compute)
