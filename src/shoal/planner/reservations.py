"""What running jobs are promised of their devices, as members leave them and others join."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.planner.planning_context import PlanningContext

__all__ = ["reservations"]


def reservations(
    running: Sequence[tuple[Job, Device]], joins: Mapping[str, Sequence[Array]], planning: PlanningContext
) -> dict[str, Demand]:
    """What running jobs are promised from now on, of those for which that is not what it was.

    A promise grows only as others join: an estimate that turns out too low says what a job takes, and promises it no
    more. The compute that a job began with is its own until it needs less.

    Args:
        running: all jobs that hold devices, those that train with the members that they have now.
        joins: id of a job -> who joins it.
        planning: what is known of keys and devices.

    Returns:
        By the id of the job.
    """
    changed: dict[str, Demand] = {}
    for job, device in running:
        come = joins.get(job.id, ())
        if job.purpose is not Purpose.TRAIN or not (job.arrays or come):
            continue
        demand = planning.demand([*job.arrays, *come], device, None)
        before = job.demand
        if before is not None:
            compute = min(before.compute, demand.compute)
            kept = demand if come else _least(before, demand)
            if (compute, kept.memory, kept.cores) == (before.compute, before.memory, before.cores):
                continue
            demand = replace(kept, compute=compute, seconds=before.seconds)
        if demand != before:
            changed[job.id] = demand
    return changed


def _least(before: Demand, now: Demand) -> Demand:
    """The smaller of two memories and cores; 0 says that nothing is known."""
    memory = min(filter(None, (before.memory, now.memory)), default=0)
    cores = min(filter(None, (before.cores, now.cores)), default=0.0)
    return replace(now, memory=memory, cores=cores)
