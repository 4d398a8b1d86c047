"""Jobs that share a device or grow over several, so that a group of trials ends soon (Fluid)."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from shoal.core.device import Cluster, Device, Node
from shoal.schedule.action import Action, JobState, Plan, Resize, Resume, Start
from shoal.schedule.base import JobView, Policy
from shoal.schedule.device_strips import ROUNDING, DeviceStrips
from shoal.schedule.dynamic_fluid import resize, share_out
from shoal.schedule.refusals import Refusals
from shoal.schedule.static_fluid import due_widths, lay

__all__ = ["WaterFilling"]


@final
class WaterFilling(Policy):
    """Fluid's water-filling: the more work a trial has left, the more devices it gets, from 1/c of one up to d.

    1. StaticFluid lays the waiting jobs of each TrialGroup, the group that came first first, on what is idle. Jobs of
       no group that run on the same kinds of device are one group.
    2. DynamicFluid gives all jobs the widths that they are due on the whole cluster, where that is worth a resize: it
       makes room while jobs wait, and spreads them over what is idle when none does.
    3. What is left of a shared device is divided among the jobs on it.

    A width below 1 is a share of a device, at most c of which are on one; a width from 1 on is whole devices of one
    kind, which the job has to itself. So a job that is neither to share nor to grow, c = d = 1, gets a device of its
    own, and devices are not oversubscribed. Jobs that are not preemptible stay as they are, as do those on devices
    that are gone or not healthy.

    Beyond the paper: parts of devices count as idle; devices that rounding down would leave idle go to the trial that
    would end last; scaling down is undone as far as nobody takes what it frees.
    """

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        layout = DeviceStrips(cluster, jobs)
        before = dict(layout.places)
        usable = {job.id: _usable(job, cluster) for job in jobs}
        seconds = {
            job.id: min((job.demand[device.kind].seconds for device in usable[job.id]), default=0.0) for job in jobs
        }
        waiting = [job for job in jobs if job.state is not JobState.RUNNING and usable[job.id]]
        for group in _groups(waiting):
            names = dict.fromkeys(device.name for job in group for device in usable[job.id])
            widths = due_widths(
                [seconds[job.id] for job in group],
                [job.scaling for job in group],
                sum(layout.free(name) for name in names),
            )
            lay(layout, group, {job.id: width for job, width in zip(group, widths, strict=True)}, seconds)
        movable = [job for job in jobs if job.id in layout.places and _may_move(job, layout)]
        left = [job for job in waiting if job.id not in layout.places]
        if movable:
            names = dict.fromkeys(device.name for job in (*movable, *left) for device in usable[job.id])
            resize(layout, movable, left, seconds, _devices(layout, movable, names))
        share_out(layout, {job.id: job for job in jobs if job.id in layout.places and _may_move(job, layout)}, before)
        actions = tuple(_actions(jobs, DeviceStrips(cluster, jobs), layout))
        return Plan(actions, _refusals(jobs, actions, cluster))


_PLACING: Mapping[JobState, type[Start] | type[Resume] | type[Resize]] = {
    JobState.WAITING: Start,
    JobState.SUSPENDED: Resume,
    JobState.RUNNING: Resize,
}


def _usable(job: JobView, cluster: Cluster) -> list[Device]:
    """Healthy devices that the job could run on if they were empty."""
    return [device for node, device in cluster if device.healthy and _fits_alone(job, node, device)]


def _fits_alone(job: JobView, node: Node, device: Device) -> bool:
    demand = job.demand.get(device.kind)
    return (
        demand is not None
        and demand.memory <= device.memory
        and demand.cores <= node.cores + ROUNDING
        and (device.capacity > 0 if job.scaling.sharing > 1 else demand.compute <= device.capacity + ROUNDING)
    )


def _groups(jobs: Sequence[JobView]) -> list[list[JobView]]:
    """Jobs by TrialGroup, in the order of the oldest job of each."""
    groups: dict[Hashable, list[JobView]] = {}
    for job in jobs:
        key = tuple(sorted(job.demand)) if job.group is None else job.group
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def _may_move(job: JobView, layout: DeviceStrips) -> bool:
    if job.state is not JobState.RUNNING:
        return True
    return job.preemptible and all(name in layout.devices for name in job.devices)


def _devices(layout: DeviceStrips, movable: Sequence[JobView], names: Iterable[str]) -> float:
    """How many of these devices are not taken by jobs that may not be moved."""
    free = {name: layout.free(name) for name in names}
    for job in movable:
        place = layout.places[job.id]
        for name in place.devices:
            if name in free:
                free[name] = min(1.0, free[name] + place.width)
    return sum(free.values())


def _actions(jobs: Sequence[JobView], now: DeviceStrips, then: DeviceStrips) -> Iterator[Action]:
    """What leads from one layout to the other, in an order in which every place is free when it is taken.

    Jobs only ever go to what others have left, so there is such an order.
    """
    pending = [
        job
        for job in jobs
        if (place := then.places.get(job.id)) and not (job.id in now.places and place.same(now.places[job.id]))
    ]
    while pending:
        blocked: list[JobView] = []
        for job in pending:
            old = now.lift(job) if job.id in now.places else None
            place = then.places[job.id]
            if now.fits(job, place):
                now.put(job, place)
                yield _PLACING[job.state](job.id, place.devices, then.share(job, place))
                continue
            blocked.append(job)
            if old is not None:
                now.put(job, old)
        if len(blocked) == len(pending):
            return
        pending = blocked


def _refusals(jobs: Sequence[JobView], actions: Sequence[Action], cluster: Cluster) -> Refusals:
    """Reasons of the jobs that are not begun: a device that others are on counts as busy."""
    placed = {action.job: action for action in actions if isinstance(action, (Start, Resume, Resize))}
    count = sum(job.state is not JobState.RUNNING and job.id not in placed for job in jobs)

    def after() -> list[JobView]:
        return [
            replace(job, state=JobState.RUNNING, devices=action.devices, share=action.share)
            if (action := placed.get(job.id))
            else _asking(job)
            for job in jobs
        ]

    return Refusals(count, after, (), cluster, exclusive=True)


def _asking(job: JobView) -> JobView:
    """The job as it asks for a device: one that may share has no compute that it must have."""
    if job.state is JobState.RUNNING or job.scaling.sharing == 1:
        return job
    return replace(job, demand={kind: replace(demand, compute=0.0) for kind, demand in job.demand.items()})
