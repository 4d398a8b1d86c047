"""Measurement of interference: epochs of jobs alone and beside others on a device, from their reports."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import final

from shoal.core.array import FusionKey
from shoal.core.device import Device
from shoal.core.event import Reported
from shoal.core.job import Job
from shoal.core.resources import ROUNDING
from shoal.cost.estimate import compute
from shoal.cost.store import EpochTimes

__all__ = ["InterferenceTracker"]

MIN_EPOCHS = 2
"""Number of epochs per measurement. The shortest counts, because other programs may have disturbed one of them."""

SLACK = 0.1
"""Largest relative difference between a share and an equal part of a device."""


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
class InterferenceTracker:
    """Measures epochs of jobs beside others on their devices, and alone, for the profile store (Fluid: α and c).

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
    if abs(share - compute(array.profile, len(array.members))) <= ROUNDING:
        return True
    return jobs > 1 and abs(share * jobs - device.compute) <= SLACK * device.compute
