"""How many devices each trial of a group is due, and where it is laid (Fluid, Algorithm 1: StaticFluid)."""

import heapq
from collections.abc import Mapping, Sequence
from math import floor

from shoal.cost.scaling import Scaling
from shoal.schedule.base import JobView
from shoal.schedule.device_strips import ROUNDING, DeviceStrips, StripPlacement

__all__ = ["due_widths", "fill_up", "lay"]


def due_widths(seconds: Sequence[float], scalings: Sequence[Scaling], devices: float) -> list[float]:
    """Width of each trial in proportion to its work.

    w_i = min(max(⌊h_{i,1} / Σ_j h_{j,1} · n⌋, 1/c), d); a trial of no known time counts as an equal part.

    Args:
        seconds: h_{i,1}, what each still takes alone on one device.
        scalings: c and d of each.
        devices: n, how many there are to divide; parts of devices count as such.
    """
    total = sum(seconds)
    parts = [each / total for each in seconds] if total > 0 else [1 / len(seconds)] * len(seconds)
    return [
        float(min(max(floor(part * devices + ROUNDING), 1 / scaling.sharing), scaling.devices))
        for part, scaling in zip(parts, scalings, strict=True)
    ]


def fill_up(
    widths: Sequence[float], seconds: Sequence[float], scalings: Sequence[Scaling], devices: float
) -> list[float]:
    """Widths with what rounding down has left over: one more device at a time, to the trial that would end last.

    A trial takes part of a device, a whole one, two, and so on; it gets no device that would not make it faster.

    Args:
        widths: due to each; see `due_widths`.
        seconds: h_{i,1}.
        scalings: h(w) and d of each.
        devices: n.
    """
    found = list(widths)
    spare = devices - sum(found)
    heap = [(-seconds[i] * scalings[i].factor(width), i) for i, width in enumerate(found)]
    heapq.heapify(heap)
    while heap and spare > ROUNDING:
        _, i = heapq.heappop(heap)
        width, scaling = found[i], scalings[i]
        wider = 1.0 if width < 1 else width + 1
        if wider <= scaling.devices and wider - width <= spare + ROUNDING:
            time = scaling.factor(wider)
            if time < scaling.factor(width):
                spare -= wider - width
                found[i] = wider
                heapq.heappush(heap, (-seconds[i] * time, i))
    return found


def lay(
    layout: DeviceStrips, jobs: Sequence[JobView], widths: Mapping[str, float], seconds: Mapping[str, float]
) -> None:
    """Place jobs in non-increasing width, the longer of equals first, on the least loaded devices.

    A job gets fewer devices than it is due where there are not as many, and a part of one, at least 1/c, where none is
    idle. One that finds no place is left out.

    Args:
        layout: to place them on.
        jobs: that lie nowhere.
        widths: job -> devices that it is due.
        seconds: job -> h_{i,1}.
    """
    for job in sorted(jobs, key=lambda job: (-widths[job.id], -seconds[job.id])):
        place = _place(layout, job, widths[job.id])
        if place is not None:
            layout.put(job, place)


def _place(layout: DeviceStrips, job: JobView, width: float) -> StripPlacement | None:
    if width >= 1 and (place := layout.whole(job, int(width))) is not None:
        return place
    if job.scaling.sharing == 1:
        return None
    return layout.part(job, 1 / job.scaling.sharing)
