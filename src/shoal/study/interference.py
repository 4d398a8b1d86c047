"""Interference: how fast jobs run alone and on shared devices, measured from their reports."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import final

from shoal.core.array import FusionKey
from shoal.core.device import Cluster, Device
from shoal.core.event import Reported
from shoal.core.job import Job
from shoal.cost.estimate import compute
from shoal.cost.store import EpochTimes
from shoal.schedule.oversubscription import OversubscriptionTuner

__all__ = ["InterferenceTracker"]

_ROUNDING = 1e-6
"""Largest difference of compute that counts as rounding."""

ENOUGH = 2
"""Number of equal epochs; the shortest counts, since other programs may have disturbed a single one."""

SLACK = 0.1
"""Largest relative difference between a share and an even part of a device."""

_Alike = tuple[FusionKey, int, str]
"""Key, number of members and kind of device of an array: equal values take equal time alone."""


@dataclass
class _ColocatedJob:
    """A job on a device, with its epochs since the colocation last changed.

    Args:
        job: The job.
        trials: Numbers of the trials of its last report.
        reported: Whether it has reported since the change; its next epoch began after the change.
        times: Seconds of its epochs that count.
        seen: Compute reserved to it, and its speed as a fraction of that alone, in its newest epoch that counts.
    """

    job: Job
    trials: frozenset[int] = frozenset()
    reported: bool = False
    times: list[float] = field(default_factory=list)
    seen: tuple[float, float] | None = None


@dataclass
class _Colocation:
    """A device, and the jobs on it by id."""

    device: Device
    colocated_jobs: dict[str, _ColocatedJob] = field(default_factory=dict)

    def change(self) -> None:
        """Discard the epochs measured so far: the jobs on the device have changed."""
        for colocated in self.colocated_jobs.values():
            colocated.reported, colocated.seen = False, None
            colocated.times.clear()

    def reserved(self) -> float | None:
        """Sum of the compute reserved to the jobs, as a fraction of the device's.

        None if it is unknown for a job, or if a job has several arrays or a share, which no ratio changes.
        """
        jobs = [colocated.job for colocated in self.colocated_jobs.values()]
        if any(len(job.arrays) != 1 or _has_share(job) for job in jobs):
            return None
        profiles = [job.arrays[0].profile for job in jobs]
        if not self.device.compute > 0 or None in profiles:
            return None
        return sum(compute(profile) for profile in profiles if profile is not None) / self.device.compute


def _has_share(job: Job) -> bool:
    """Whether a job of one array was reserved another part of its device than it demands."""
    (array,) = job.arrays
    if array.profile is None or job.demand is None:
        return False
    return abs(job.demand.compute - compute(array.profile)) > _ROUNDING


@final
class InterferenceTracker:
    """Measures epochs of jobs alone and on shared devices, for the oversubscription tuner and the profile store.

    An epoch counts if the job has reported an earlier one since the last change: of the jobs on the device, of the
    trials in one of them, or of the ratio. So epochs with a start or a compilation do not count, and jobs of one or two
    epochs are never measured. A device is observed once each of its jobs has an epoch that counts. A job's speed is the
    least seconds of an epoch of as many members of its key, on a device without oversubscription, divided by its
    seconds now. A device is not observed while this speed is unknown for one of its jobs.

    As in a simulation, the tuner gets no observation of a device while no trial waits, while the device holds more than
    a lowered ratio allows, or while it holds a job of several arrays, which take turns.

    Args:
        tuner: Oversubscription tuner, which keeps the ratios. Sharing is measured only on the kinds that it tunes.
    """

    def __init__(self, tuner: OversubscriptionTuner) -> None:
        self._tuner = tuner
        self._by_device: dict[str, _Colocation] = {}
        self._place: dict[str, _Colocation] = {}
        self._alone: dict[_Alike, float] = {}
        self._single: dict[_Alike, float] = {}

    def cluster(self, cluster: Cluster) -> Cluster:
        """The cluster with the present oversubscription ratios."""
        return self._tuner.apply(cluster)

    def begin(self, job: Job, device: Device) -> None:
        """Add a job that starts on a device."""
        self.end(job.id)
        colocation = self._by_device.setdefault(device.name, _Colocation(device))
        colocation.colocated_jobs[job.id] = _ColocatedJob(job)
        colocation.change()
        self._place[job.id] = colocation

    def end(self, job: str) -> None:
        """Remove a job that has left its device."""
        if (colocation := self._place.pop(job, None)) is not None:
            del colocation.colocated_jobs[job]
            colocation.change()

    def change(self, job: Job) -> None:
        """Update a job whose members or arrays have changed."""
        if (colocation := self._place.get(job.id)) is not None:
            colocation.colocated_jobs[job.id].job = job
            colocation.change()

    def epoch(self, event: Reported, has_waiting: Callable[[], bool]) -> EpochTimes | None:
        """Measure an epoch that members of a job have finished together.

        Args:
            event: Reports of the members.
            has_waiting: Whether trials wait for a device.

        Returns:
            Times of the epochs with the present jobs on the device; None if too few epochs count yet, or if the job has
            several arrays, members at different epochs, or a share that is not an even part.
        """
        if (colocation := self._place.get(event.job)) is None or not event.reports:
            return None
        colocated = colocation.colocated_jobs[event.job]
        if len(colocated.job.arrays) != 1:  # they take turns, and report in turns
            return None
        trials = frozenset(report.trial for report in event.reports)
        if trials != colocated.trials:  # the job has just started, or has lost members
            colocated.trials = trials
            colocation.change()
        if not colocated.reported:
            colocated.reported = True
            return None
        seconds = sum(report.seconds for report in event.reports)
        if not 0 < seconds < inf:
            return None
        tuned = self._tuner.tunes(colocation.device.kind)
        if tuned and (reserved := colocation.reserved()) is not None:
            self._watch(colocation, colocated, seconds, reserved, has_waiting)
        if len({report.epoch for report in event.reports}) > 1 or not (tuned or len(colocation.colocated_jobs) == 1):
            return None
        return self._seen(colocation, colocated, seconds)

    def _seen(self, colocation: _Colocation, colocated: _ColocatedJob, seconds: float) -> EpochTimes | None:
        """Times of the epochs with the present jobs on the device."""
        alike, jobs = _alike(colocated, colocation.device.kind), len(colocation.colocated_jobs)
        if jobs == 1:
            if _has_share(colocated.job):
                return None
            self._single[alike] = min(seconds, self._single.get(alike, seconds))
        colocated.times.append(seconds)
        if len(colocated.times) < ENOUGH or not _is_part(colocated.job, colocation.device, jobs):
            return None
        return EpochTimes(
            jobs, len(colocated.trials), min(colocated.times), self._single.get(alike) if jobs > 1 else None
        )

    def _watch(
        self,
        colocation: _Colocation,
        colocated: _ColocatedJob,
        seconds: float,
        reserved: float,
        has_waiting: Callable[[], bool],
    ) -> None:
        """Count an epoch for the tuner."""
        self._note(colocated, colocation.device.kind, seconds, reserved)
        seen = [each.seen for each in colocation.colocated_jobs.values() if each.seen is not None]
        if len(seen) == len(colocation.colocated_jobs):
            self._observe(colocation, seen, reserved, has_waiting)

    def _note(self, colocated: _ColocatedJob, kind: str, seconds: float, reserved: float) -> None:
        """Note the speed of a job in an epoch that counts."""
        (array,) = colocated.job.arrays
        alike = _alike(colocated, kind)
        if reserved <= 1 + _ROUNDING:
            self._alone[alike] = min(seconds, self._alone.get(alike, seconds))
        if alike in self._alone and array.profile is not None:
            colocated.seen = compute(array.profile), self._alone[alike] / seconds

    def _observe(
        self,
        colocation: _Colocation,
        seen: list[tuple[float, float]],
        reserved: float,
        has_waiting: Callable[[], bool],
    ) -> None:
        """Give the tuner an observation of a device, if it may count."""
        kind = colocation.device.kind
        ratio = self._tuner.ratio(kind)
        for colocated in colocation.colocated_jobs.values():
            colocated.seen = None
        if reserved > ratio + _ROUNDING or not has_waiting():
            return
        self._tuner.observe(kind, seen)
        if self._tuner.ratio(kind) != ratio:
            for each in self._by_device.values():
                if each.device.kind == kind:
                    each.change()


def _is_part(job: Job, device: Device, jobs: int) -> bool:
    """Whether a job has an even part of its device, or all that it demands."""
    if not _has_share(job) or job.demand is None:
        return True
    return abs(job.demand.compute * jobs / device.compute - 1) <= SLACK


def _alike(colocated: _ColocatedJob, kind: str) -> _Alike:
    (array,) = colocated.job.arrays
    return replace(array.key, order=0), len(colocated.trials), kind
