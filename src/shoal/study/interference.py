"""Measurement of interference: the speed of jobs alone and on shared devices, from their reports."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import final

from shoal.core.array import Array, FusionKey
from shoal.core.device import Cluster, Device
from shoal.core.event import Reported
from shoal.core.job import Job
from shoal.cost.estimate import compute
from shoal.cost.store import EpochTimes
from shoal.schedule.oversubscription import OversubscriptionTuner

__all__ = ["InterferenceTracker"]

_ROUNDING = 1e-6
"""Largest difference of compute that counts as rounding."""

MIN_EPOCHS = 2
"""Number of epochs per measurement. The shortest counts, because other programs may have disturbed one of them."""

SLACK = 0.1
"""Largest relative difference between a share and an equal part of a device, and between epochs that count as equal."""

_ArrayClass = tuple[FusionKey, int, str]
"""Key, number of members and kind of device of an array: arrays with equal values take equal time when alone."""


@dataclass
class _ColocatedJob:
    """A job on a device, with its epochs since the colocation last changed."""

    job: Job
    trials: frozenset[int] = frozenset()
    reported: bool = False
    times: list[float] = field(default_factory=list)
    speed: tuple[float, float] | None = None


@dataclass
class _Colocation:
    device: Device
    colocated_jobs: dict[str, _ColocatedJob] = field(default_factory=dict)

    def change(self) -> None:
        """Discard the epochs measured so far: the jobs on the device have changed."""
        for colocated in self.colocated_jobs.values():
            colocated.reported, colocated.speed = False, None
            colocated.times.clear()

    def reserved(self) -> float | None:
        """Part of the device's compute that is reserved; None if unknown, or fixed by several arrays or a share."""
        jobs = [colocated.job for colocated in self.colocated_jobs.values()]
        if any(len(job.arrays) != 1 or _has_share(job) for job in jobs):
            return None
        demands = [_demand(job.arrays[0]) for job in jobs]
        if not self.device.compute > 0 or None in demands:
            return None
        return sum(demand for demand in demands if demand is not None) / self.device.compute


def _demand(array: Array) -> float | None:
    return None if array.profile is None else compute(array.profile, len(array.members))


def _has_share(job: Job) -> bool:
    """Whether the reservation of a job of one array differs from its demand."""
    (array,) = job.arrays
    demand = _demand(array)
    if demand is None or job.demand is None:
        return False
    return abs(job.demand.compute - demand) > _ROUNDING


@final
class InterferenceTracker:
    """Measures epochs of jobs alone and on shared devices, for the oversubscription tuner and the profile store.

    An epoch counts if the job has reported an earlier one since the last change: of the jobs on the device, of the
    trials in one of them, or of the ratio. So epochs with a start or a compilation do not count, and jobs of one or two
    epochs are never measured. A device is observed once each of its jobs has an epoch that counts. A job's speed is the
    least seconds of an epoch of as many members of its key, on a device without oversubscription, divided by its
    seconds now. These least seconds are of this study, else of earlier ones, from the profile. A device is not observed
    while this speed is unknown for one of its jobs. The first job whose speed cannot be known above a ratio of 1, or
    with an epoch shorter than the history has it alone, ends the use of the ratio of earlier studies.

    On every kind of device, epochs beside other jobs are compared with epochs alone, for Fluid's α and c. As in a
    simulation, the tuner gets no observation of a device while no trial waits, while the device holds more than a
    lowered ratio allows, or while it holds a job of several arrays, which take turns."""

    def __init__(self, tuner: OversubscriptionTuner) -> None:
        self._tuner = tuner
        self._by_device: dict[str, _Colocation] = {}
        self._colocation_of: dict[str, _Colocation] = {}
        self._alone: dict[_ArrayClass, float] = {}
        self._outdated: set[_ArrayClass] = set()
        self._single: dict[_ArrayClass, float] = {}

    def cluster(self, cluster: Cluster) -> Cluster:
        """The cluster with the present oversubscription ratios."""
        return self._tuner.apply(cluster)

    def begin(self, job: Job, device: Device) -> None:
        """Add a job that starts on a device."""
        self.end(job.id)
        colocation = self._by_device.setdefault(device.name, _Colocation(device))
        colocation.colocated_jobs[job.id] = _ColocatedJob(job)
        colocation.change()
        self._colocation_of[job.id] = colocation

    def end(self, job: str) -> None:
        """Remove a job that has left its device."""
        if (colocation := self._colocation_of.pop(job, None)) is not None:
            del colocation.colocated_jobs[job]
            colocation.change()

    def change(self, job: Job) -> None:
        """Update a job whose members, arrays or share of the device have changed."""
        if (colocation := self._colocation_of.get(job.id)) is not None:
            colocation.colocated_jobs[job.id].job = job
            colocation.change()

    def epoch_alone(self, job: str) -> tuple[int, float] | None:
        """Members and least seconds of an epoch of a job of one array without oversubscription; None if unknown."""
        if (colocation := self._colocation_of.get(job)) is None:
            return None
        colocated = colocation.colocated_jobs[job]
        if len(colocated.job.arrays) != 1:
            return None
        seconds = self._alone.get(_array_class(colocated, colocation.device.kind))
        return None if seconds is None else (len(colocated.trials), seconds)

    def epoch(self, event: Reported, has_waiting: Callable[[], bool]) -> EpochTimes | None:
        """Measure an epoch that members of a job have finished together, with the present jobs on the device.

        None if too few epochs count yet, or if the job has several arrays, members at different epochs, or a share that
        is not an equal part.
        """
        if (colocation := self._colocation_of.get(event.job)) is None or not event.reports:
            return None
        colocated = colocation.colocated_jobs[event.job]
        kind = colocation.device.kind
        if len(colocated.job.arrays) != 1:  # arrays of one job take turns
            self._tuner.forget(kind)
            return None
        trials = frozenset(report.trial for report in event.reports)
        if trials != colocated.trials:  # the job has just started, or has lost members
            colocated.trials = trials
            colocation.change()
        if _has_share(colocated.job) or self._seconds_alone(colocated, kind) is None:
            self._tuner.forget(kind)
        if not colocated.reported:
            colocated.reported = True
            return None
        seconds = sum(report.seconds for report in event.reports)
        if not 0 < seconds < inf:
            return None
        if self._tuner.tunes(kind) and (reserved := colocation.reserved()) is not None:
            self._count_for_tuner(colocation, colocated, seconds, reserved, has_waiting)
        if len({report.epoch for report in event.reports}) > 1:
            return None
        return self._epoch_times(colocation, colocated, seconds)

    def _epoch_times(self, colocation: _Colocation, colocated: _ColocatedJob, seconds: float) -> EpochTimes | None:
        array_class, jobs = _array_class(colocated, colocation.device.kind), len(colocation.colocated_jobs)
        if jobs == 1:
            if _has_share(colocated.job):
                return None
            self._single[array_class] = min(seconds, self._single.get(array_class, seconds))
        colocated.times.append(seconds)
        if len(colocated.times) < MIN_EPOCHS or not _has_even_share(colocated.job, colocation.device, jobs):
            return None
        return EpochTimes(
            jobs, len(colocated.trials), min(colocated.times), self._single.get(array_class) if jobs > 1 else None
        )

    def _count_for_tuner(
        self,
        colocation: _Colocation,
        colocated: _ColocatedJob,
        seconds: float,
        reserved: float,
        has_waiting: Callable[[], bool],
    ) -> None:
        self._record_speed(colocated, colocation.device.kind, seconds, reserved)
        seen = [each.speed for each in colocation.colocated_jobs.values() if each.speed is not None]
        if len(seen) == len(colocation.colocated_jobs):
            self._report_to_tuner(colocation, seen, reserved, has_waiting)

    def _record_speed(self, colocated: _ColocatedJob, kind: str, seconds: float, reserved: float) -> None:
        (array,) = colocated.job.arrays
        array_class = _array_class(colocated, kind)
        if reserved <= 1 + _ROUNDING:
            self._alone[array_class] = min(seconds, self._alone.get(array_class, seconds))
        alone, demand = self._seconds_alone(colocated, kind), _demand(array)
        if array_class not in self._alone and alone is not None and seconds < (1 - SLACK) * alone:
            self._tuner.forget(kind)  # no job is faster than alone, so epochs were longer in earlier studies
            self._outdated.add(array_class)
            alone = None
        if alone is not None and demand is not None:
            colocated.speed = demand, alone / seconds

    def _seconds_alone(self, colocated: _ColocatedJob, kind: str) -> float | None:
        """Least seconds of an epoch without oversubscription: in this study, else in earlier ones; None if unknown."""
        array_class = _array_class(colocated, kind)
        if array_class in self._alone:
            return self._alone[array_class]
        (array,) = colocated.job.arrays
        if array.profile is None or array_class in self._outdated:
            return None
        return array.profile.epoch_seconds.get(len(colocated.trials))

    def _report_to_tuner(
        self,
        colocation: _Colocation,
        seen: list[tuple[float, float]],
        reserved: float,
        has_waiting: Callable[[], bool],
    ) -> None:
        """Pass an observation of a device to the tuner unless it must be ignored."""
        kind = colocation.device.kind
        ratio = self._tuner.ratio(kind)
        for colocated in colocation.colocated_jobs.values():
            colocated.speed = None
        if reserved > ratio + _ROUNDING or not has_waiting():
            return
        self._tuner.observe(kind, seen)
        if self._tuner.ratio(kind) != ratio:
            for each in self._by_device.values():
                if each.device.kind == kind:
                    each.change()


def _has_even_share(job: Job, device: Device, jobs: int) -> bool:
    """Whether a job has an equal part of its device, or all of its demand."""
    if not _has_share(job) or job.demand is None:
        return True
    return abs(job.demand.compute * jobs / device.compute - 1) <= SLACK


def _array_class(colocated: _ColocatedJob, kind: str) -> _ArrayClass:
    (array,) = colocated.job.arrays
    return replace(array.key, order=0), len(colocated.trials), kind
