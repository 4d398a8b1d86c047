"""Widths that follow what is freed, lost or asked for (Fluid, Algorithm 2: DynamicFluid)."""

from collections.abc import Mapping, Sequence
from math import floor

from shoal.schedule.action import JobState
from shoal.schedule.base import JobView
from shoal.schedule.device_strips import ROUNDING, DeviceStrips, StripPlacement
from shoal.schedule.static_fluid import due_widths, fill_up, lay

__all__ = ["resize", "share_out"]


def resize(
    layout: DeviceStrips,
    movable: Sequence[JobView],
    waiting: Sequence[JobView],
    seconds: Mapping[str, float],
    devices: float,
) -> None:
    """Give all jobs the widths that they are due by now, where that is worth what it costs.

    - Scale down if w' < w and w' (h(w') + ε) < w h(w): less device time in all.
    - Jobs that wait are laid on what that frees.
    - Scale up if w' > w and h(w') + ε < h(w).
    - A job that was scaled down gets back what nobody has taken.

    While no job waits, widths are filled up (`fill_up`). A job that this plan begins pays no ε.

    Args:
        layout: where jobs lie; changed.
        movable: jobs on it that may be moved.
        waiting: jobs that lie nowhere.
        seconds: job -> h_{i,1}.
        devices: n, those that are not taken by jobs that may not be moved.
    """
    jobs = sorted([*movable, *waiting], key=lambda job: -seconds[job.id])
    times, scalings = [seconds[job.id] for job in jobs], [job.scaling for job in jobs]
    widths = due_widths(times, scalings, devices)
    if not waiting:
        widths = fill_up(widths, times, scalings, devices)
    due = {job.id: width for job, width in zip(jobs, widths, strict=True)}
    before = dict(layout.places)
    on = [job for job in jobs if job.id in before]
    narrowed = [job for job in on if _narrow(layout, job, due[job.id])]
    lay(layout, waiting, due, seconds)
    for job in on:
        _grow(layout, job, due[job.id])
    for job in narrowed:
        _restore(layout, job, before[job.id])


def _narrow(layout: DeviceStrips, job: JobView, width: float) -> bool:
    old = layout.places[job.id]
    if not width < old.width - ROUNDING:
        return False
    new = StripPlacement(old.devices[: max(1, floor(width))], width)
    layout.lift(job)
    saves = layout.fits(job, new) and (
        new.width * (layout.seconds(job, new) + _cost(job)) < old.width * layout.seconds(job, old)
    )
    layout.put(job, new if saves else old)
    return saves


def _grow(layout: DeviceStrips, job: JobView, width: float) -> None:
    old = layout.places[job.id]
    if width < 1 or width <= old.width + ROUNDING:
        return
    layout.lift(job)
    new = layout.whole(job, int(width), keep=old.devices)
    gains = new is not None and layout.seconds(job, new) + _cost(job) < layout.seconds(job, old)
    layout.put(job, new if new is not None and gains else old)


def _restore(layout: DeviceStrips, job: JobView, before: StripPlacement) -> None:
    now = layout.lift(job)
    idle = set(layout.idle())
    left = tuple(name for name in before.devices if name in idle)
    candidates = (before, StripPlacement(left, float(len(left))), now)
    layout.put(job, next(place for place in candidates if place.devices and layout.fits(job, place)))


def share_out(layout: DeviceStrips, movable: Mapping[str, JobView], before: Mapping[str, StripPlacement]) -> None:
    """Divide what is left of every shared device equally among the jobs there, where that is worth what it costs.

    Args:
        layout: where jobs lie; changed.
        movable: the jobs on it that may be moved, by id.
        before: job -> where it runs.
    """
    for name in layout.devices:
        here = [job for job in layout.here(name) if job.id in movable and job.scaling.sharing > 1]
        free = layout.free(name)
        if not here or free <= ROUNDING:
            continue
        gaining = [job for job in here if _widened_gains(layout, job, free / len(here), before.get(job.id))]
        for job in gaining:
            place = layout.places[job.id]
            layout.move(job, StripPlacement(place.devices, min(1.0, place.width + free / len(gaining))))


def _widened_gains(layout: DeviceStrips, job: JobView, extra: float, before: StripPlacement | None) -> bool:
    """Whether so much more of its device is worth a resize; a job that is begun or resized anyway pays nothing more."""
    place = layout.places[job.id]
    if before is None or not place.same(before):
        return True
    wider = StripPlacement(place.devices, min(1.0, place.width + extra))
    return layout.seconds(job, wider) + _cost(job) < layout.seconds(job, place)


def _cost(job: JobView) -> float:
    """ε."""
    return job.scaling.resize_seconds if job.state is JobState.RUNNING else 0.0
