"""Lending of the cores of idle CPU slots to running jobs."""

from collections.abc import Sequence
from math import inf

from shoal.core.device import Cluster, Device
from shoal.core.job import Job, Purpose
from shoal.cost.estimate import packed_demand

__all__ = ["lent_cores"]


def lent_cores(running: Sequence[tuple[Job, Device]], idle: Sequence[Device], cluster: Cluster) -> dict[str, int]:
    """Divide the cores of idle CPU slots among the training jobs of their machine that have one device.

    One slot after another goes to the job that is expected to end last if all its cores help in full; among equals, to
    the one with the fewest cores.

    Args:
        running: All jobs that hold devices, with their present members.
        idle: Devices without a job that may get jobs.
        cluster: The current cluster.

    Returns:
        Id of each job that gets cores -> its cores, including those of its own slot.
    """
    cores: dict[str, int] = {}
    on_several = {job.assists for job, _ in running}
    for slot in idle:
        node = cluster.places[slot.name][0] if slot.is_cpu else None
        borrowers = {
            job.id: (_seconds_left(job), cores.get(job.id, device.cores))
            for job, device in running
            if node is not None
            and device.is_cpu
            and _may_borrow(job)
            and cluster.places[device.name][0] is node
            and job.id not in on_several
        }
        if borrowers:
            last = max(borrowers, key=lambda job: (borrowers[job][0] / borrowers[job][1], -borrowers[job][1]))
            cores[last] = borrowers[last][1] + slot.cores
    return cores


def _may_borrow(job: Job) -> bool:
    """Return whether a job trains arrays; programs get their number of threads when they start."""
    return job.purpose is Purpose.TRAIN and not any(array.key.opaque for array in job.arrays)


def _seconds_left(job: Job) -> float:
    """Return the expected seconds until the end of a job; inf if an array was never measured."""
    arrays = [array for array in job.arrays if array.members]
    known = [(array.profile, array.epochs) for array in arrays if array.profile is not None]
    if len(known) < len(arrays):
        return inf
    return packed_demand(known).seconds if known else 0.0
