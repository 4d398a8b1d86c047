"""Limits of the processes of jobs that share a device."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.core.device import Device
from shoal.core.job import Job

__all__ = ["limit_placed", "memory_limit"]

MEMORY_SLACK = 1.25
"""Memory limit of a job as a multiple of its demand, which is an estimate, before `UNMEASURED_BYTES`."""

UNMEASURED_BYTES = 512 << 20
"""Bytes that each limit adds to the demand, which counts live tensors: for workspaces of libraries, memory pools of
recorded steps, and fragmentation."""

_Placed = Sequence[tuple[Job, Device]]


def limit_placed(placed: _Placed, held: _Placed, limits_shares: Callable[[Device], bool]) -> list[tuple[Job, Device]]:
    """Limit each starting job that shares its device to its reservation; a job alone on its device has no limit.

    A limit of compute holds as long as the process lives. A job that began alone keeps all of the compute when others
    come, since a new process would cost more than the limit is worth: the others have limits.
    """
    jobs_on = _jobs_on(held, placed)
    limited = []
    for job, device in placed:
        count = jobs_on[device.name]
        compute = _reserved(job, device) if count > 1 and limits_shares(device) else job.limit
        limited.append((replace(job, limit=compute, memory_limit=memory_limit(job, device, count)), device))
    return limited


def memory_limit(job: Job, device: Device, jobs: int) -> int:
    """Return the bytes that a job may use of a GPU that so many jobs hold; 0 for no limit, as if it is alone there."""
    if jobs <= 1 or not device.is_cuda or job.demand is None or not job.demand.memory:
        return 0
    return int(job.demand.memory * MEMORY_SLACK) + UNMEASURED_BYTES


def _jobs_on(held: _Placed, placed: _Placed) -> Counter[str]:
    return Counter(device.name for _, device in (*held, *placed))


def _reserved(job: Job, device: Device) -> float | None:
    if job.demand is None or not device.compute > 0 or job.demand.compute >= device.compute:
        return None
    return job.demand.compute / device.compute
