"""Device time that fusing and packing saved a study, from its journal and what was measured of each structure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from shoal.core.activity import Activity
from shoal.core.job import Purpose
from shoal.core.rows import JobRow
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.history import History

__all__ = ["Savings", "savings"]


@dataclass(frozen=True)
class Savings:
    """Device time of the epochs of a study, trained together and one trial at a time.

    Args:
        epochs: Number of epochs of trials whose structure was measured; the others are in none of the sums.
        together: Seconds that these epochs took.
        alone: Seconds that they would take one trial at a time, by the measured speed-up of arrays of each size. That
            of validation is not measured: it counts as it is, from the time that its job reports at its end. Checks
            against plain PyTorch count as nothing, since a trial alone needs none.
        packed: Seconds that jobs with several arrays saved by sharing a process, by the measured relative times of
            their structures. They are a part of `alone - together`.
        measuring: Seconds of the jobs that found fusion keys or profiled.
    """

    epochs: int
    together: float
    alone: float
    packed: float
    measuring: float

    @property
    def faster(self) -> float:
        """Seconds by which these epochs were faster than one trial at a time; negative if they were slower."""
        return self.alone - self.together

    @property
    def saved(self) -> float:
        """Seconds saved, less those of measuring; negative if measuring cost more than it gained."""
        return self.faster - self.measuring


def savings(journal: JournalView, history: History) -> Savings | None:
    """Compare the time of the reported epochs with that of one trial at a time; None if nothing shared was measured."""
    if journal.spec.opaque:  # programs are neither fused nor packed
        return None
    jobs = {job.id: job for job in journal.jobs()}
    kinds = {device.name: device.kind for device in journal.devices(all_runs=True)}
    costs = _costs_by_steps(history)
    if not any((structure, kinds[job.device]) in costs for job in jobs.values() for structure in job.members):
        return None  # before the epochs are read, of which there may be a million
    structures = {
        (job.id, trial): structure
        for job in jobs.values()
        for structure, trials in job.members.items()
        for trial in trials
    }
    epochs, together, alone, packed = 0, 0.0, 0.0, 0.0
    shared = False
    for name, trial, members, took in StudyStatistics(journal).array_epochs():
        job = jobs.get(name)
        if job is None:
            continue
        kind = kinds[job.device]
        cost = costs.get((structures.get((name, trial), ""), kind))
        if cost is None:
            continue
        epochs += members
        together += took
        unpacked = took * (1 + _pack_gain(job, history.relative_times(kind)))
        packed += unpacked - took
        validation, checks = _shares(job)
        alone += unpacked * (validation + (1 - validation - checks) * _speedup(cost, members))
        shared = shared or sum(map(len, job.members.values())) > 1
    if not shared:
        return None
    measuring = sum(
        job.ended - job.started
        for job in jobs.values()
        if job.purpose in (Purpose.SIGNATURE, Purpose.PROFILE) and job.ended is not None
    )
    return Savings(epochs, together, alone, packed, measuring)


def _costs_by_steps(history: History) -> dict[tuple[str, str], Cost]:
    """A cost by `FusionKey.steps` and kind of device; the time of a step depends on no other part of a key."""
    return {(f"{structure} x {size}", kind): Cost(found) for (structure, _, size, kind), found in history.all().items()}


def _speedup(cost: Cost, members: int) -> float:
    """Speed-up of steps of an array over those of its members one after another, from 1 to their number.

    A smaller one is that of plain steps, which an array takes where they are faster; a larger one was disturbed.
    """
    gain = cost.fused_gain(members)
    if gain is None:
        gain = members * cost.step_seconds(1) / cost.step_seconds(members)
    return min(max(gain, 1.0), float(members))


def _shares(job: JobRow) -> tuple[float, float]:
    """Return the parts of the time of a job's epochs in which it validated and checked arrays; 0 while it runs."""
    validation, checks = (job.activities.get(each, 0.0) for each in (Activity.VALIDATION, Activity.CHECKS))
    steps = sum(job.activities.get(each, 0.0) for each in (Activity.STEPS, Activity.TIMED_STEPS))
    total = (validation + checks + steps) or 1.0
    return validation / total, checks / total


def _pack_gain(job: JobRow, relative_times: Mapping[tuple[str, str], float]) -> float:
    """Return the time that packing saves a job, relative to the time that it takes; 0 if that was not measured."""
    pairs: Sequence[tuple[str, str]] = list(combinations(sorted(job.keys), 2))
    measured = [relative_times[pair] for pair in pairs if pair in relative_times]
    return max(0.0, 1 / fmean(measured) - 1) if measured else 0.0
