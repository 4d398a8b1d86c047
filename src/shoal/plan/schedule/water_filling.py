"""The water-filling policy: jobs share a device or spread over several, so that groups of trials end soon (Fluid)."""

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import floor
from statistics import fmean
from typing import final

from shoal.core.device import Cluster, Device, Node
from shoal.core.resources import ROUNDING
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule.base import Action, JobState, JobView, Plan, Policy, Resize, Resume, Start, Suspend
from shoal.plan.schedule.growth import DeviceStrips, StripPlacement, grow, narrowed
from shoal.plan.schedule.refusals import Refusals

__all__ = ["WaterFilling", "due_widths", "fill_up"]


@final
class WaterFilling(Policy):
    """Fluid's water-filling: the more work a trial has left, the more devices it gets, from 1/c of one up to d.

    1. A job admitted beyond c is suspended if sharing costs it more than waiting.
    2. StaticFluid places the waiting jobs of each TrialGroup on idle resources, the oldest group first. Jobs without a
       group that run on the same kinds of devices are one group.
    3. DynamicFluid gives all jobs their due widths on the whole cluster, where that is worth a resize. It takes devices
       from jobs only if no job waits (section 3.3); while jobs wait, a device is shared with them up to c.
    4. If jobs still wait, and their c is 1 without a measurement, one of them is tried beside a running job on half a
       device (`Scaling.trial`). The measured times of both then decide c (section 4.2.2).
    5. The rest of a shared device is divided among its jobs.
    6. If no job waits, one running job is tried on one idle device more than was measured (`Scaling.grows`). The
       measured time of its steps then decides d; once jobs wait, it gives the device back.

    A width below 1 is a share of a device, with at most c shares per device; a width from 1 on is whole devices of one
    kind, which the job has to itself. So a job with c = d = 1 gets a device of its own, and devices are not
    oversubscribed. Jobs that are not preemptible, and jobs on removed or unhealthy devices, stay as they are.

    Beyond the paper: parts of devices count as idle; devices that rounding down would leave idle go to the trial that
    would end last; scaling down is undone as far as no job takes the freed devices.
    """

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        usable = {job.id: _usable(job, cluster) for job in jobs}
        as_they_are = jobs
        if any(job.state is not JobState.RUNNING and usable[job.id] for job in jobs):
            jobs = [narrowed(job, job.scaling.devices, cluster) for job in jobs]  # without devices on trial
        layout = DeviceStrips(cluster, jobs)
        seconds = {
            job.id: min((job.demand[device.kind].seconds for device in usable[job.id]), default=0.0) for job in jobs
        }
        suspended = {job.id for job in _beyond_limit(layout, seconds)}
        every, jobs = jobs, [job for job in jobs if job.id not in suspended]
        before = dict(layout.places)
        waiting = [job for job in jobs if job.state is not JobState.RUNNING and usable[job.id]]
        for related in _jobs_by_trial_group(waiting):
            names = dict.fromkeys(device.name for job in related for device in usable[job.id])
            widths = due_widths(
                [seconds[job.id] for job in related],
                [job.scaling for job in related],
                sum(layout.free(name) for name in names),
            )
            _place_jobs(layout, related, {job.id: width for job, width in zip(related, widths, strict=True)}, seconds)
        movable = [job for job in jobs if job.id in layout.places and _may_move(job, layout)]
        left = [job for job in waiting if job.id not in layout.places]
        if movable:
            names = dict.fromkeys(device.name for job in (*movable, *left) for device in usable[job.id])
            _resize(layout, movable, left, seconds, _devices(layout, movable, names))
            _try_sharing(layout, movable, left)
        placed = {job.id: job for job in jobs if job.id in layout.places and _may_move(job, layout)}
        _divide_rest(layout, placed, before)
        if all(job.id in layout.places for job in waiting):
            grow(layout, list(placed.values()))
        suspensions = [Suspend(job.id) for job in every if job.id in suspended]
        now_on = DeviceStrips(cluster, [job for job in as_they_are if job.id not in suspended])
        actions = (*suspensions, *_actions(jobs, now_on, layout))
        return Plan(actions, _refusals(every, actions, cluster))


def due_widths(seconds: Sequence[float], scalings: Sequence[Scaling], devices: float) -> list[float]:
    """Return the width of each trial in proportion to its work (Fluid, Algorithm 1: StaticFluid).

    w_i = min(max(⌊h_{i,1} / Σ_j h_{j,1} · n⌋, 1/c), d); if no trial has a known time, all parts are equal.

    Args:
        seconds: h_{i,1}, seconds left of each trial alone on one device.
        devices: n, number of devices to divide, including parts of devices.
    """
    total = sum(seconds)
    parts = [each / total for each in seconds] if total > 0 else [1 / len(seconds)] * len(seconds)
    return [
        float(min(max(floor(part * devices + ROUNDING), 1 / scaling.max_jobs), scaling.devices))
        for part, scaling in zip(parts, scalings, strict=True)
    ]


def fill_up(
    widths: Sequence[float], seconds: Sequence[float], scalings: Sequence[Scaling], devices: float
) -> list[float]:
    """Return the widths including the devices that rounding down has left over, one at a time to the trial that would
    end last.

    A trial grows from a part of a device to a whole one, two, and so on; it gets no device that would not speed it up.
    """
    filled = list(widths)
    left_over = devices - sum(filled)
    heap = [(-seconds[i] * scalings[i].factor(width), i) for i, width in enumerate(filled)]
    heapq.heapify(heap)
    while heap and left_over > ROUNDING:
        _, i = heapq.heappop(heap)
        width, scaling = filled[i], scalings[i]
        wider = 1.0 if width < 1 else width + 1
        if wider <= scaling.devices and wider - width <= left_over + ROUNDING:
            time = scaling.factor(wider)
            if time < scaling.factor(width):
                left_over -= wider - width
                filled[i] = wider
                heapq.heappush(heap, (-seconds[i] * time, i))
    return filled


def _place_jobs(
    layout: DeviceStrips, jobs: Sequence[JobView], widths: Mapping[str, float], seconds: Mapping[str, float]
) -> None:
    """Place jobs in non-increasing width, the longer job first in a tie, on the least loaded devices.

    A job gets fewer devices than due if there are not enough, and a part of at least 1/c if no device is idle. A job
    that fits nowhere is left out."""
    for job in sorted(jobs, key=lambda job: (-widths[job.id], -seconds[job.id])):
        place = _find_place(layout, job, widths[job.id])
        if place is not None:
            layout.place(job, place)


def _find_place(layout: DeviceStrips, job: JobView, width: float) -> StripPlacement | None:
    if width >= 1 and (place := layout.whole_devices(job, int(width))) is not None:
        return place
    if job.scaling.max_jobs == 1:
        return None
    return layout.device_part(job, 1 / job.scaling.max_jobs)


def _resize(
    layout: DeviceStrips,
    movable: Sequence[JobView],
    waiting: Sequence[JobView],
    seconds: Mapping[str, float],
    devices: float,
) -> None:
    """Give all jobs their due widths, where the gain exceeds the cost (Fluid, Algorithm 2: DynamicFluid).

    - Scale down if w' < w and w' (h(w') + ε) < w h(w): less device time in total. A job of several devices keeps them
      while jobs wait.
    - Place waiting jobs on the freed parts of devices.
    - Scale up if w' > w and h(w') + ε < h(w).
    - Give a job that was scaled down its free devices back.

    If no job waits, widths are filled up (`fill_up`). A job that this plan starts pays no ε."""
    jobs = sorted([*movable, *waiting], key=lambda job: -seconds[job.id])
    times, scalings = [seconds[job.id] for job in jobs], [job.scaling for job in jobs]
    widths = due_widths(times, scalings, devices)
    if not waiting:
        widths = fill_up(widths, times, scalings, devices)
    due = {job.id: width for job, width in zip(jobs, widths, strict=True)}
    before = dict(layout.places)
    placed = [job for job in jobs if job.id in before]
    shrinkable = [job for job in placed if not waiting or before[job.id].width <= 1]
    scaled_down = [job for job in shrinkable if _scale_down(layout, job, due[job.id])]
    _place_jobs(layout, waiting, due, seconds)
    for job in placed:
        _scale_up(layout, job, due[job.id])
    for job in scaled_down:
        _restore_width(layout, job, before[job.id])


def _scale_down(layout: DeviceStrips, job: JobView, width: float) -> bool:
    old = layout.places[job.id]
    if not width < old.width - ROUNDING:
        return False
    new = StripPlacement(old.devices[: max(1, floor(width))], width)
    layout.remove(job)
    saves = layout.fits(job, new) and (
        new.width * (layout.seconds(job, new) + _cost(job)) < old.width * layout.seconds(job, old)
    )
    layout.place(job, new if saves else old)
    return saves


def _scale_up(layout: DeviceStrips, job: JobView, width: float) -> None:
    old = layout.places[job.id]
    if width < 1 or width <= old.width + ROUNDING:
        return
    layout.remove(job)
    new = layout.whole_devices(job, int(width), preferred=old.devices)
    gains = new is not None and layout.seconds(job, new) + _cost(job) < layout.seconds(job, old)
    layout.place(job, new if new is not None and gains else old)


def _restore_width(layout: DeviceStrips, job: JobView, before: StripPlacement) -> None:
    now = layout.remove(job)
    idle = set(layout.idle_devices())
    left = tuple(name for name in before.devices if name in idle)
    candidates = (before, StripPlacement(left, float(len(left))), now)
    layout.place(job, next(place for place in candidates if place.devices and layout.fits(job, place)))


def _beyond_limit(layout: DeviceStrips, seconds: Mapping[str, float]) -> list[JobView]:
    """Take a job from each device with more jobs than c, where waiting costs less than sharing; return these jobs.

    p jobs of equal length m end after h(1/p) m. Without the newest one they end after h(1/(p-1)) m, and the newest one,
    which runs after them, m + ε later."""
    taken: list[JobView] = []
    for name in layout.devices:
        jobs = layout.jobs_on(name)
        removable = [job for job in jobs if job.preemptible]
        if not removable or len(jobs) <= min(job.scaling.max_jobs for job in jobs):
            continue
        if any(job.share is None for job in jobs):  # another policy placed them
            continue
        newest = max(removable, key=lambda job: job.since)
        together, fewer = (fmean(job.scaling.factor(1 / p) for job in jobs) for p in (len(jobs), len(jobs) - 1))
        left = min(seconds[job.id] for job in jobs)
        if (fewer + 1) * left + _cost(newest) < together * left:
            layout.remove(newest)
            taken.append(newest)
    return taken


def _try_sharing(layout: DeviceStrips, movable: Sequence[JobView], waiting: Sequence[JobView]) -> None:
    """Place one waiting job beside a running one, half a device each; not while another such trial runs."""
    on_device = [layout.jobs_on(name) for name in layout.devices]
    if any(len(jobs) > 1 and any(job.scaling.trial for job in jobs) for jobs in on_device):
        return
    hosts = [job for job in movable if job.state is JobState.RUNNING and job.scaling.trial]
    for guest in waiting:
        if guest.id in layout.places or not guest.scaling.trial:
            continue
        for host in hosts:
            half, before = StripPlacement(layout.places[host.id].devices[:1], 0.5), layout.places[host.id]
            if len(before.devices) > 1 or len(layout.jobs_on(before.devices[0])) > 1:
                continue
            layout.move(host, half)
            if layout.fits(guest, half):
                layout.place(guest, half)
                return
            layout.move(host, before)


def _divide_rest(layout: DeviceStrips, movable: Mapping[str, JobView], before: Mapping[str, StripPlacement]) -> None:
    """Divide the rest of every shared device equally among its jobs, where the gain exceeds the cost."""
    for name in layout.devices:
        sharers = [job for job in layout.jobs_on(name) if job.id in movable and job.scaling.may_share]
        free = layout.free(name)
        if not sharers or free <= ROUNDING:
            continue
        gaining = [job for job in sharers if _is_worth_widening(layout, job, free / len(sharers), before.get(job.id))]
        for job in gaining:
            place = layout.places[job.id]
            layout.move(job, StripPlacement(place.devices, min(1.0, place.width + free / len(gaining))))


def _is_worth_widening(layout: DeviceStrips, job: JobView, extra: float, before: StripPlacement | None) -> bool:
    """Return whether `extra` more of its device is worth a resize; a job that is started or resized anyway pays
    nothing.
    """
    place = layout.places[job.id]
    if before is None or not place.is_close(before):
        return True
    wider = StripPlacement(place.devices, min(1.0, place.width + extra))
    return layout.seconds(job, wider) + _cost(job) < layout.seconds(job, place)


def _cost(job: JobView) -> float:
    """Return ε, the cost of a resize; 0 for a job that does not run."""
    return job.scaling.resize_seconds if job.state is JobState.RUNNING else 0.0


_PLACING: Mapping[JobState, type[Start] | type[Resume] | type[Resize]] = {
    JobState.WAITING: Start,
    JobState.SUSPENDED: Resume,
    JobState.RUNNING: Resize,
}


def _usable(job: JobView, cluster: Cluster) -> list[Device]:
    """Return the healthy devices on which the job would fit alone."""
    return [device for node, device in cluster if device.healthy and _fits_alone(job, node, device)]


def _fits_alone(job: JobView, node: Node, device: Device) -> bool:
    demand = job.demand.get(device.kind)
    return (
        demand is not None
        and demand.memory <= device.memory
        and demand.cores <= node.cores + ROUNDING
        and (device.capacity > 0 if job.scaling.may_share else demand.compute <= device.capacity + ROUNDING)
    )


def _jobs_by_trial_group(jobs: Sequence[JobView]) -> list[list[JobView]]:
    """Jobs by TrialGroup, in the order of the oldest job of each group."""
    by_trial_group: dict[Hashable, list[JobView]] = {}
    for job in jobs:
        key = tuple(sorted(job.demand)) if job.trial_group is None else job.trial_group
        by_trial_group.setdefault(key, []).append(job)
    return list(by_trial_group.values())


def _may_move(job: JobView, layout: DeviceStrips) -> bool:
    if job.state is not JobState.RUNNING:
        return True
    return job.preemptible and all(name in layout.devices for name in job.devices)


def _devices(layout: DeviceStrips, movable: Sequence[JobView], names: Iterable[str]) -> float:
    """Return the number of these devices, including parts, without those of jobs that may not be moved."""
    free = {name: layout.free(name) for name in names}
    for job in movable:
        place = layout.places[job.id]
        for name in place.devices:
            if name in free:
                free[name] = min(1.0, free[name] + place.width)
    return sum(free.values())


def _actions(jobs: Sequence[JobView], now: DeviceStrips, then: DeviceStrips) -> Iterator[Action]:
    """Return the actions that change one layout into the other, in an order in which every place is free when it is
    taken.

    Such an order exists, since jobs only move to resources that other jobs have left.
    """
    pending = [
        job
        for job in jobs
        if (place := then.places.get(job.id)) and not (job.id in now.places and place.is_close(now.places[job.id]))
    ]
    while pending:
        blocked: list[JobView] = []
        for job in pending:
            old = now.remove(job) if job.id in now.places else None
            place = then.places[job.id]
            if now.fits(job, place):
                now.place(job, place)
                yield _PLACING[job.state](job.id, place.devices, then.share(job, place))
                continue
            blocked.append(job)
            if old is not None:
                now.place(job, old)
        if len(blocked) == len(pending):
            return
        pending = blocked


def _refusals(jobs: Sequence[JobView], actions: Sequence[Action], cluster: Cluster) -> Refusals:
    """Return the refusals of the jobs without a place; a device with any job counts as busy."""
    placed = {action.job: action for action in actions if isinstance(action, (Start, Resume, Resize))}
    suspended = {action.job: action for action in actions if isinstance(action, Suspend)}
    jobs = [job.after(suspended[job.id]) if job.id in suspended else job for job in jobs]
    count = sum(job.state is not JobState.RUNNING and job.id not in placed for job in jobs)

    def after() -> list[JobView]:
        return [job.after(action) if (action := placed.get(job.id)) else _without_compute(job) for job in jobs]

    return Refusals(count, after, (), cluster, exclusive=True)


def _without_compute(job: JobView) -> JobView:
    """Return the view of a job for its refusal: a waiting job that may share needs no fixed compute."""
    if job.state is JobState.RUNNING or not job.scaling.may_share:
        return job
    return replace(job, demand={kind: replace(demand, compute=0.0) for kind, demand in job.demand.items()})
