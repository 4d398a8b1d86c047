"""Device time that fusing and packing saved a study, and the speed-up to expect of them, from its journal and what was
measured of each structure.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean

from shoal.core.activity import MEASURING, TRAINING_STEPS, Activity, seconds_of
from shoal.core.rows import JobRow
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.history import History

__all__ = ["Savings", "Speedup", "SpeedupWatch", "savings", "speedup"]

BUSY = 0.9
"""Fraction of a device from which on a trial alone fills it."""
_OF_EPOCHS = (
    *(*TRAINING_STEPS, Activity.COMPILE, Activity.AUTOTUNE),
    *(Activity.CHECKS, Activity.END_EPOCH, Activity.VALIDATION),
)
"""Activities within the seconds that epochs report; others are outside of epochs, of BUILD nearly all."""


@dataclass(frozen=True)
class Savings:
    """Device time of the epochs of a study, trained together and one trial at a time.

    Args:
        epochs: Number of epochs of trials whose structure was measured; the others are in none of the sums.
        together: Seconds that these epochs took.
        alone: Seconds that they would take one trial at a time, by the measured speed-up of the training steps of
            arrays of each size, and no faster of a structure in plain PyTorch. Validation, `end_epoch`, compilation and
            autotuning count as they are, from the activities that their job reports at its end; a job that was killed
            is divided as the others are. Checks against plain PyTorch count as nothing: a trial alone needs none.
        packed: Seconds that jobs with several arrays saved by sharing a process, by the measured relative times of
            their structures. They are a part of `alone - together`.
        measuring: Seconds of `MEASURING` that jobs have reported, in jobs of any purpose.
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


@dataclass(frozen=True)
class Speedup:
    """Measured speed-up of the steps of arrays and packs over one trial at a time, from 1 on.

    Args:
        least: Of the structure that gains least.
        most: Of the one that gains most.
        members: Size of the largest array; 1 if no trials are fused.
        fills: What a single trial fills: "core", "CPU", "GPU", or "" if it leaves a part idle.
    """

    least: float
    most: float
    members: int
    fills: str


def speedup(journal: JournalView, history: History) -> Speedup | None:
    """Return the speed-up of the structures that have trained; None before any was measured.

    A structure of several trials that are not fused, since none of several measured sizes was faster, has a speed-up of
    1. One whose arrays were refused, or take plain steps, counts only in packs.
    """
    if journal.spec.opaque or not journal.spec.fuse:
        return None
    kinds = {device.name: device.kind for device in journal.devices(all_runs=True)}
    plain = _plain_keys(journal)
    largest = {verdict.key: 1 if verdict.key in plain else verdict.members for verdict in journal.verdicts()}
    trials: dict[tuple[str, str], set[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    packs: dict[tuple[str, str], float] = {}
    for job in journal.jobs():
        kind = kinds[job.device]
        packed = _pack_gain(job, history.relative_times(kind))
        for structure, numbers in job.members.items():  # of training jobs alone, with those that joined later
            key = structure, kind
            size = min(len(numbers), largest.get(structure, 0))
            if not size and len(numbers) > 1:
                continue  # the array has taken no step yet
            trials.setdefault(key, set()).update(numbers)
            sizes[key] = max(sizes.get(key, 1), size)
            if packed is not None:
                packs[key] = max(packs.get(key, 0.0), packed)
    costs = _costs_by_steps(history) if sizes else {}
    gains, cores, filled = [], 0.0, True
    for key, size in sizes.items():
        cost = costs.get(key)
        if cost is None or (size > 1 and not _is_measured(cost, size)):
            continue
        declined = size == 1 < len(trials[key]) and max(cost.profile.step_seconds) > 1
        if key in packs or (key[0] not in plain and (size > 1 or declined)):
            gains.append(_speedup(cost, size) * (1 + packs.get(key, 0.0)))
            filled = filled and cost.compute() >= BUSY
            cores = max(cores, cost.profile.cores)
    if not gains:
        return None
    on_cpu = all(kind.startswith("cpu") for _, kind in sizes)
    fills = ("core" if cores < 1 + BUSY else "CPU") if on_cpu else "GPU"
    return Speedup(min(gains), max(gains), max(sizes.values()), fills if filled else "")


class SpeedupWatch:
    """Records the speed-up of a study once it is measured, for display.

    It looks ever more rarely.

    Args:
        clock: Function that returns the time in seconds.
    """

    def __init__(self, journal: Journal, history: History, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal, self._history, self._clock = journal, history, clock
        self._pause = 0.5
        self._due = clock()

    def update(self) -> None:
        """Look if that is due; the engine calls it in each turn of its loop."""
        if self._clock() >= self._due and "speedup" not in self._journal.study:
            self._due = self._clock() + self._pause
            self._pause *= 1.25
            self.record()

    def record(self) -> None:
        """Record what is measured now."""
        if (found := speedup(self._journal, self._history)) is not None:
            self._journal.put("speedup", asdict(found))


def savings(journal: JournalView, history: History) -> Savings | None:
    """Compare the time of the reported epochs with that of one trial at a time; None if nothing shared was measured."""
    if journal.spec.opaque:  # programs are neither fused nor packed
        return None
    jobs = {job.id: job for job in journal.jobs()}
    kinds = {device.name: device.kind for device in journal.devices(all_runs=True)}
    costs, plain = _costs_by_steps(history), _plain_keys(journal)
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
    reported = {each: sum(job.activities.get(each, 0.0) for job in jobs.values()) for each in _OF_EPOCHS}
    for name, trial, members, took in StudyStatistics(journal).array_epochs():
        job = jobs.get(name)
        if job is None:
            continue
        kind = kinds[job.device]
        structure = structures.get((name, trial), "")
        cost = costs.get((structure, kind))
        if cost is None:
            continue
        epochs += members
        together += took
        unpacked = took * (1 + (_pack_gain(job, history.relative_times(kind)) or 0.0))
        packed += unpacked - took
        steps, checks = _shares(job.activities or reported)
        gain = 1.0 if structure in plain else _speedup(cost, members)
        alone += unpacked * (1 - steps - checks + steps * gain)
        shared = shared or sum(map(len, job.members.values())) > 1
    if not shared:
        return None
    measuring = sum(seconds_of(MEASURING, job.activities) for job in jobs.values())
    return Savings(epochs, together, alone, packed, measuring)


def _plain_keys(journal: JournalView) -> set[str]:
    """`FusionKey.steps` of the structures that train in plain PyTorch."""
    return {verdict.key for verdict in journal.verdicts() if verdict.is_plain}


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


def _is_measured(cost: Cost, members: int) -> bool:
    """Whether steps of an array of this size were timed, or of a larger and a smaller one."""
    return cost.fused_gain(members) is not None or members <= max(cost.profile.step_seconds)


def _shares(spent: Mapping[Activity, float]) -> tuple[float, float]:
    """Return the parts of the time of epochs in which training steps were taken and arrays checked, by the seconds of
    each activity; 1 and 0 if nothing was reported.
    """
    total = seconds_of(_OF_EPOCHS, spent)
    if not total:
        return 1.0, 0.0
    return seconds_of(TRAINING_STEPS, spent) / total, spent.get(Activity.CHECKS, 0.0) / total


def _pack_gain(job: JobRow, relative_times: Mapping[tuple[str, str], float]) -> float | None:
    """Return the time that packing saves a job, relative to the time that it takes; None if that was not measured."""
    pairs: Sequence[tuple[str, str]] = list(combinations(sorted(job.keys), 2))
    measured = [relative_times[pair] for pair in pairs if pair in relative_times]
    return max(0.0, 1 / fmean(measured) - 1) if measured else None
