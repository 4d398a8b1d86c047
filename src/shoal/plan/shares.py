"""Shares of devices: the limits that a share sets to the process of a job, and the measurement of its cost.

A job holds one `Share` (`core.resources`) of each of its devices: compute, memory and cores. The terms of the papers
and of MPS are views of the compute. They follow from two measurements of an array: `share_speeds`, the speed of
a process on a part of an empty device, and `crowding`, the time of an epoch beside other jobs over that alone.

    term               view of a share                              follows from
    HyperSack, c_p     reserved, unless the policy names a share:   `share_speeds`: least share with 95 % of the
                       `cost.cost.Cost.compute`                     speed; else the part of the device in use
    HyperSack, r       capacity of a device over its compute:       not measured: set by the user
                       `Device.oversubscription`
    Fluid, c and 1/c   most jobs on a device, and least share:      `crowding`: last number of jobs that paid;
                       `Scaling.max_jobs`                           else 1 / c_p
    Fluid, α           cost: time on share w over that on all of    `crowding`: fitted; else 1, which means no cost
                       the device, α^(1/w - 1): `Scaling.factor`
    MPS, percentage    limit of a process, for its life:            share that the job reserved when it started,
                       `Job.compute_limit`                          if beside others: `limit_placed`
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import final

from shoal.core.array import FusionKey
from shoal.core.device import Device
from shoal.core.event import Reported
from shoal.core.job import Job
from shoal.core.resources import ROUNDING
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.costs import EpochTimes
from shoal.plan.job_tracker import PreemptionRequest
from shoal.plan.schedule.base import JobView

__all__ = ["CrowdingMeter", "limit_placed", "memory_limit", "restarted_alone"]

MEMORY_SLACK = 1.25
"""Memory limit of a job as a multiple of its demand, which is an estimate, before `UNMEASURED_BYTES`."""

UNMEASURED_BYTES = 512 << 20
"""Bytes that each limit adds to the demand, which counts live tensors: for workspaces of libraries, memory pools of
recorded steps, and fragmentation."""

_Placed = Sequence[tuple[Job, Device]]

MIN_EPOCHS = 2
"""Number of epochs per measurement. The shortest counts, because other programs may have disturbed one of them."""

SLACK = 0.1
"""Largest relative difference between a share and an equal part of a device."""


def limit_placed(placed: _Placed, held: _Placed, can_limit: Callable[[Device], bool]) -> list[tuple[Job, Device]]:
    """Limit each starting job that shares its device to its reservation; a job alone on its device has no limit.

    A limit of compute holds as long as the process lives. A job that began alone keeps all of the compute when others
    start beside it, which have limits; one that is left alone is restarted without a limit where that pays.

    Args:
        placed: Starting jobs, with their devices.
        held: Running jobs, with their devices.
        can_limit: Whether processes on a device can be limited to a part of its compute, as by MPS.

    Returns:
        The starting jobs with `compute_limit` (None: all of the compute) and `memory_limit` (bytes; 0: none).
    """
    jobs_on = _jobs_on(held, placed)
    limited = []
    for job, device in placed:
        count = jobs_on[device.name]
        limit = _reserved(job, device) if count > 1 and can_limit(device) else job.compute_limit
        limited.append((replace(job, compute_limit=limit, memory_limit=memory_limit(job, device, count)), device))
    return limited


def restarted_alone(held: _Placed, placed: _Placed, views: Iterable[JobView]) -> dict[str, PreemptionRequest]:
    """Return requests to limited jobs that have their devices to themselves, where a restart costs less than the limit.

    A limit holds as long as the process lives, so such a job would else leave a part of its device unused to its end.
    """
    jobs_on, view_of = _jobs_on(held, placed), {view.id: view for view in views if view.preemptible}
    requests: dict[str, PreemptionRequest] = {}
    for job, device in held:
        if (limit := job.compute_limit) is None or jobs_on[device.name] > 1 or job.id not in view_of:
            continue
        view = view_of[job.id]
        lost = view.demand[device.kind].seconds * (view.scaling.factor(limit) - 1)
        if lost > view.switch_seconds and not _suffices(limit, job):
            text = f"restarted, as it has {device.name} to itself and its process is limited to {limit:.0%}"
            requests[job.id] = PreemptionRequest(True, text)
    return requests


def _jobs_on(held: _Placed, placed: _Placed) -> Counter[str]:
    return Counter(device.name for _, device in (*held, *placed))


def _suffices(limit: float, job: Job) -> bool:
    """Return whether a part of the device was measured to be enough for a job."""
    profile = job.arrays[0].profile if len(job.arrays) == 1 else None
    return profile is not None and Cost(profile).suffices(limit, len(job.arrays[0].members))


def memory_limit(job: Job, device: Device, jobs: int) -> int:
    """Return the bytes that a job may use of a GPU that so many jobs hold; 0 for no limit, as if it is alone there."""
    if jobs <= 1 or not device.is_cuda or job.demand is None or not job.demand.memory:
        return 0
    return int(job.demand.memory * MEMORY_SLACK) + UNMEASURED_BYTES


def _reserved(job: Job, device: Device) -> float | None:
    """Return the part of the compute of a device that a job reserves; None for all of it, or if unknown."""
    if job.demand is None or not device.compute > 0 or job.demand.compute >= device.compute:
        return None
    return job.demand.compute / device.compute


@dataclass
class _MeasuredJob:
    """A job on a device, with the seconds of its epochs since the jobs on the device last changed."""

    job: Job
    trials: frozenset[int] = frozenset()
    reported: bool = False
    seconds: list[float] = field(default_factory=list)


@dataclass
class _MeasuredDevice:
    device: Device
    jobs: dict[str, _MeasuredJob] = field(default_factory=dict)

    def restart(self) -> None:
        """Discard the epochs measured so far: the jobs on the device have changed."""
        for measured in self.jobs.values():
            measured.reported = False
            measured.seconds.clear()


@final
class CrowdingMeter:
    """Measures epochs of jobs beside others on their devices, and alone, for `Costs` (Fluid: α and c).

    An epoch counts if the job has reported an earlier one since the last change of the jobs on the device, of the
    trials in one of them, or of a share. So epochs with a start or a compilation do not count, and jobs of one or two
    epochs are never measured.
    """

    def __init__(self) -> None:
        self._devices: dict[str, _MeasuredDevice] = {}
        self._device_of: dict[str, _MeasuredDevice] = {}
        self._alone: dict[tuple[FusionKey, int, str], float] = {}
        """Key, number of members and kind of device -> least seconds of an epoch alone on such a device."""

    def begin(self, job: Job, device: Device) -> None:
        """Add a job that starts on a device."""
        self.end(job.id)
        measured = self._device_of[job.id] = self._devices.setdefault(device.name, _MeasuredDevice(device))
        measured.jobs[job.id] = _MeasuredJob(job)
        measured.restart()

    def end(self, job: str) -> None:
        """Remove a job that has left its device."""
        if (measured := self._device_of.pop(job, None)) is not None:
            del measured.jobs[job]
            measured.restart()

    def change(self, job: Job) -> None:
        """Update a job whose members, arrays or share of the device have changed."""
        if (measured := self._device_of.get(job.id)) is not None:
            measured.jobs[job.id].job = job
            measured.restart()

    def epoch(self, event: Reported) -> EpochTimes | None:
        """Measure an epoch that the members of a job have finished together, beside the present jobs on its device.

        Returns:
            The shortest epoch since the last change. None: fewer than `MIN_EPOCHS` count so far, or the job has several
            arrays (which take turns), members at different epochs, or another share than its demand or an equal part.
        """
        here = self._device_of.get(event.job)
        if here is None or not event.reports:
            return None
        measured, jobs = here.jobs[event.job], len(here.jobs)
        if len(measured.job.arrays) != 1:
            return None
        trials = frozenset(report.trial for report in event.reports)
        if trials != measured.trials:  # the job has just started, or has lost members
            measured.trials = trials
            here.restart()
        if not measured.reported:
            measured.reported = True
            return None
        seconds = sum(report.seconds for report in event.reports)
        at_one_epoch = len({report.epoch for report in event.reports}) == 1
        if not (0 < seconds < inf and at_one_epoch and _is_comparable(measured.job, here.device, jobs)):
            return None
        array_class = (replace(measured.job.arrays[0].key, order=0), len(trials), here.device.kind)
        if jobs == 1:
            self._alone[array_class] = min(seconds, self._alone.get(array_class, seconds))
        measured.seconds.append(seconds)
        if len(measured.seconds) < MIN_EPOCHS:
            return None
        alone = self._alone.get(array_class) if jobs > 1 else None
        return EpochTimes(jobs, len(trials), min(measured.seconds), alone)


def _is_comparable(job: Job, device: Device, jobs: int) -> bool:
    """Whether the share of a job of one array is its demand of compute, or an equal part of a device with others."""
    (array,) = job.arrays
    if array.profile is None or job.demand is None:
        return True
    share = job.demand.compute
    if abs(share - Cost(array.profile).compute(len(array.members))) <= ROUNDING:
        return True
    return jobs > 1 and abs(share * jobs - device.compute) <= SLACK * device.compute
