"""Limits of the processes of jobs that share a device, and restarts of jobs whose limits are out of date."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.cost.estimate import share_speed
from shoal.planner.job_tracker import PreemptionRequest
from shoal.schedule.base import JobView

__all__ = ["jobs_to_restart", "limit_placed", "memory_limit"]

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


def jobs_to_restart(
    held: _Placed, placed: _Placed, views: Sequence[JobView], shares: Mapping[str, float | None]
) -> dict[str, PreemptionRequest]:
    """Return requests to jobs that would gain more from a process with another limit than a restart costs.

    A job may use more than its limit if it has its device to itself, or if the policy has given it a larger share. What
    it gains follows from its measured speeds on shares, or else from its measured slow-down beside others.
    """
    jobs_on, view_of = _jobs_on(held, placed), {view.id: view for view in views}
    requests: dict[str, PreemptionRequest] = {}
    for job, device in held:
        view = view_of.get(job.id)
        if job.limit is None or view is None or not view.preemptible or not device.compute > 0:
            continue
        share = shares.get(job.id, view.share)
        allowed = job.limit if share is None else min(1.0, share / device.compute)
        if jobs_on[device.name] == 1:
            allowed = 1.0
        saved = view.demand[device.kind].seconds * (
            _slowdown(job, view, job.limit) - _slowdown(job, view, max(allowed, job.limit))
        )
        if saved > view.switch_seconds:
            text = (
                f"restarted, as it may use {allowed:.0%} of {device.name} and its process is limited to {job.limit:.0%}"
            )
            requests[job.id] = PreemptionRequest(True, text)
    return requests


def _jobs_on(held: _Placed, placed: _Placed) -> Counter[str]:
    return Counter(device.name for _, device in (*held, *placed))


def _reserved(job: Job, device: Device) -> float | None:
    if job.demand is None or not device.compute > 0 or job.demand.compute >= device.compute:
        return None
    return job.demand.compute / device.compute


def _slowdown(job: Job, view: JobView, share: float) -> float:
    """Return the time of a job on a share of its device over its time on the whole device."""
    if len(job.arrays) == 1 and (profile := job.arrays[0].profile) is not None:
        speed = share_speed(profile, len(job.arrays[0].members), share)
        if speed is not None:
            return 1 / speed
    return view.scaling.factor(share)
