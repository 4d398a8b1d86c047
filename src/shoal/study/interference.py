"""How fast jobs run, alone and where they share a device, as far as their reports tell."""

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
"""Compute; what is less is due to rounding."""

ENOUGH = 2
"""Epochs alike, of which the shortest counts: a single one may have been disturbed by other programs."""

SLACK = 0.1
"""By how much of it a share may differ from an even part of a device."""

_Alike = tuple[FusionKey, int, str]
"""Key and members of an array, and the kind of its device: what takes as long alone."""


@dataclass
class _ColocatedJob:
    """A job on a device.

    Args:
        job: which.
        trials: numbers of those that reported last.
        reported: whether it has, since its company changed; its next epoch began in this company.
        times: seconds of its epochs that count, in this company.
        seen: compute promised to it, and its speed as a fraction of that alone, in its newest epoch that counts.
    """

    job: Job
    trials: frozenset[int] = frozenset()
    reported: bool = False
    times: list[float] = field(default_factory=list)
    seen: tuple[float, float] | None = None


@dataclass
class _Colocation:
    """The jobs on a device, by id."""

    device: Device
    colocated_jobs: dict[str, _ColocatedJob] = field(default_factory=dict)

    def change(self) -> None:
        """What was seen so far does not hold any more."""
        for colocated in self.colocated_jobs.values():
            colocated.reported, colocated.seen = False, None
            colocated.times.clear()

    def promised(self) -> float | None:
        """Compute, as a fraction of the device's.

        None if that is not known of a job, or one has several arrays, or a share, which it has regardless of the ratio.
        """
        jobs = [colocated.job for colocated in self.colocated_jobs.values()]
        if any(len(job.arrays) != 1 or _has_share(job) for job in jobs):
            return None
        profiles = [job.arrays[0].profile for job in jobs]
        if not self.device.compute > 0 or None in profiles:
            return None
        return sum(compute(profile) for profile in profiles if profile is not None) / self.device.compute


def _has_share(job: Job) -> bool:
    """Whether a job of one array was promised another part of its device than it asks for."""
    (array,) = job.arrays
    if array.profile is None or job.demand is None:
        return False
    return abs(job.demand.compute - compute(array.profile)) > _ROUNDING


@final
class InterferenceTracker:
    """Takes from reports what an oversubscription tuner wants to know of jobs that share a device, and what the profile
    store does: how long epochs take alone, and in company.

    A device is observed when each of its jobs has had an epoch that counts: one after another that it has reported
    since the jobs on the device, the trials in one of them, or the ratio in force changed. So the epochs in which a job
    is started or compiled do not count, and jobs that train for one or two are never observed. A job's speed is the
    least seconds of an epoch, of as many members of its key on a device on which no more was promised than it has, by
    those that it takes now; no device is observed that holds a job of which that is not known.

    As in a simulation, the tuner is not told of a device while no trial waits, or while it holds more than the ratio
    allows because that has fallen. Nor is it told of one that holds a job of several arrays, which take turns.

    Args:
        tuner: is told, and keeps the ratios; on kinds of devices that it leaves alone, company is not looked at.
    """

    def __init__(self, tuner: OversubscriptionTuner) -> None:
        self._tuner = tuner
        self._companies: dict[str, _Colocation] = {}
        self._place: dict[str, _Colocation] = {}
        self._alone: dict[_Alike, float] = {}
        self._single: dict[_Alike, float] = {}

    def cluster(self, cluster: Cluster) -> Cluster:
        """With the ratios to use now."""
        return self._tuner.apply(cluster)

    def begin(self, job: Job, device: Device) -> None:
        """A job is on a device from now on."""
        self.end(job.id)
        colocation = self._companies.setdefault(device.name, _Colocation(device))
        colocation.colocated_jobs[job.id] = _ColocatedJob(job)
        colocation.change()
        self._place[job.id] = colocation

    def end(self, job: str) -> None:
        """A job has left its device."""
        if (colocation := self._place.pop(job, None)) is not None:
            del colocation.colocated_jobs[job]
            colocation.change()

    def change(self, job: Job) -> None:
        """A job that is on a device has other members now, or other arrays."""
        if (colocation := self._place.get(job.id)) is not None:
            colocation.colocated_jobs[job.id].job = job
            colocation.change()

    def epoch(self, event: Reported, has_waiting: Callable[[], bool]) -> EpochTimes | None:
        """Members of a job have finished an epoch together.

        Args:
            event: their reports.
            has_waiting: whether trials wait for a device.

        Returns:
            What the epochs of this company show; None if that is not known yet, or the job has several arrays, members
            at different epochs, or a share that is not its part.
        """
        if (colocation := self._place.get(event.job)) is None or not event.reports:
            return None
        colocated = colocation.colocated_jobs[event.job]
        if len(colocated.job.arrays) != 1:  # they take turns, and report in turns
            return None
        trials = frozenset(report.trial for report in event.reports)
        if trials != colocated.trials:  # it has just been started, or goes on with fewer
            colocated.trials = trials
            colocation.change()
        if not colocated.reported:
            colocated.reported = True
            return None
        seconds = sum(report.seconds for report in event.reports)
        if not 0 < seconds < inf:
            return None
        tuned = self._tuner.tunes(colocation.device.kind)
        if tuned and (promised := colocation.promised()) is not None:
            self._watch(colocation, colocated, seconds, promised, has_waiting)
        if len({report.epoch for report in event.reports}) > 1 or not (tuned or len(colocation.colocated_jobs) == 1):
            return None
        return self._seen(colocation, colocated, seconds)

    def _seen(self, colocation: _Colocation, colocated: _ColocatedJob, seconds: float) -> EpochTimes | None:
        """What epochs show of the company."""
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
        promised: float,
        has_waiting: Callable[[], bool],
    ) -> None:
        """An epoch of a job counts for the tuner."""
        self._note(colocated, colocation.device.kind, seconds, promised)
        seen = [each.seen for each in colocation.colocated_jobs.values() if each.seen is not None]
        if len(seen) == len(colocation.colocated_jobs):
            self._tell(colocation, seen, promised, has_waiting)

    def _note(self, colocated: _ColocatedJob, kind: str, seconds: float, promised: float) -> None:
        """How fast a job was in an epoch that counts."""
        (array,) = colocated.job.arrays
        alike = _alike(colocated, kind)
        if promised <= 1 + _ROUNDING:
            self._alone[alike] = min(seconds, self._alone.get(alike, seconds))
        if alike in self._alone and array.profile is not None:
            colocated.seen = compute(array.profile), self._alone[alike] / seconds

    def _tell(
        self,
        colocation: _Colocation,
        seen: list[tuple[float, float]],
        promised: float,
        has_waiting: Callable[[], bool],
    ) -> None:
        kind = colocation.device.kind
        ratio = self._tuner.ratio(kind)
        for colocated in colocation.colocated_jobs.values():
            colocated.seen = None
        if promised > ratio + _ROUNDING or not has_waiting():
            return
        self._tuner.observe(kind, seen)
        if self._tuner.ratio(kind) != ratio:
            for each in self._companies.values():
                if each.device.kind == kind:
                    each.change()


def _is_part(job: Job, device: Device, jobs: int) -> bool:
    """Whether a job has as much of its device as if that were divided evenly, or takes what it needs."""
    if not _has_share(job) or job.demand is None:
        return True
    return abs(job.demand.compute * jobs / device.compute - 1) <= SLACK


def _alike(colocated: _ColocatedJob, kind: str) -> _Alike:
    (array,) = colocated.job.arrays
    return replace(array.key, order=0), len(colocated.trials), kind
