"""Lending of the cores of idle CPU slots to running jobs."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
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
    slots = [slot for slot in idle if slot.is_cpu]
    if not slots:
        return {}
    on_several = {job.assists for job, _ in running}
    borrowers: dict[str, list[tuple[float, int, int, str, float]]] = {}  # by node; the next one to get cores is first
    for position, (job, device) in enumerate(running):
        if device.is_cpu and _may_borrow(job) and job.id not in on_several:
            node, seconds = cluster.places[device.name][0], _seconds_left(job)
            borrower = (-seconds / device.cores, device.cores, position, job.id, seconds)
            borrowers.setdefault(node.name, []).append(borrower)
    for each in borrowers.values():
        heapify(each)
    cores: dict[str, int] = {}
    for slot in slots:
        if of_node := borrowers.get(cluster.places[slot.name][0].name):
            _, held, position, name, seconds = of_node[0]
            cores[name] = held + slot.cores
            heapreplace(of_node, (-seconds / cores[name], cores[name], position, name, seconds))
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
