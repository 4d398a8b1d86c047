"""Training losses of simulated trials: from a formula, or recorded ones."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import final

from shoal.core.errors import ScenarioError
from shoal.core.trial import Trial, derive_seed
from shoal.simulate.reader import reading

__all__ = ["CurveSet", "Curves", "PowerLawCurves", "RecordedCurves", "read_task"]

CURVES_FILE = "taskset_curves_8.npz"
STEPS_PER_EPOCH = 10
"""Number of losses in an epoch; of recorded curves, in the interval between two losses."""


class Curves(ABC):
    """The losses of the trials of a search; `target` is the loss to reach, or None."""

    target: float | None = None

    @abstractmethod
    def losses(self, trial: Trial, begin: int, end: int) -> Sequence[float]:
        """Return `STEPS_PER_EPOCH` losses for each epoch after `begin`, up to and with `end`."""


@final
@dataclass(frozen=True)
class PowerLawCurves(Curves):
    """loss(t) = floor + (start - floor) (1 + t)^-rate, t in epochs; floor and rate are drawn for each trial.

    A power law, as usual for learning curves (Domhan et al. 2015); floors uniform in [0, start/2], rates in [0.2, 1].
    """

    start: float = 2.3

    def losses(self, trial: Trial, begin: int, end: int) -> Sequence[float]:
        """Return the losses of the trial's own curve."""
        rng = Random(derive_seed(trial.seed, "curve"))
        floor, rate = rng.uniform(0, self.start / 2), rng.uniform(0.2, 1.0)
        steps = range(begin * STEPS_PER_EPOCH + 1, end * STEPS_PER_EPOCH + 1)
        return [floor + (self.start - floor) * (1 + step / STEPS_PER_EPOCH) ** -rate for step in steps]


@final
class RecordedCurves(Curves):
    """Recorded curves, one for each trial, with one recorded interval an epoch; after the end the last loss stays.

    Args:
        trials: Number of trials of the search, if `good` is given.
        good: Number of trials that reach the target, in random order (Hermes's bins); None: each draws any curve.
    """

    def __init__(self, task: "CurveSet", seed: int, trials: int | None = None, good: int | None = None) -> None:
        self.target, self._task, self._seed = task.target, task, seed
        self._assignment: list[int] = []
        if good is not None:
            reaching = [index for index, curve in enumerate(task.curves) if min(curve) <= task.target]
            missing_target = [index for index in range(len(task.curves)) if index not in reaching]
            if trials is None or not (good <= len(reaching) and 0 <= trials - good <= len(missing_target)):
                available = f"{len(reaching)} curves reach the target and {len(missing_target)} do not"
                raise ScenarioError(f"`good` is {good}, of {trials or 'an unknown number of'} trials; {available}")
            rng = Random(derive_seed(seed, "bin"))
            self._assignment = [*rng.sample(reaching, good), *rng.sample(missing_target, trials - good)]
            rng.shuffle(self._assignment)

    def losses(self, trial: Trial, begin: int, end: int) -> Sequence[float]:
        """Return the losses of the trial's curve, linear between recorded losses."""
        if self._assignment:
            curve = self._task.curves[self._assignment[trial.number % len(self._assignment)]]
        else:
            curve = Random(derive_seed(self._seed, "curve", trial.number)).choice(self._task.curves)
        last, losses = len(curve) - 1, []
        for step in range(begin * STEPS_PER_EPOCH + 1, end * STEPS_PER_EPOCH + 1):
            interval, part = divmod(min(step, last * STEPS_PER_EPOCH), STEPS_PER_EPOCH)
            losses.append(curve[interval] + (curve[min(interval + 1, last)] - curve[interval]) * part / STEPS_PER_EPOCH)
        return losses


@dataclass(frozen=True)
class CurveSet:
    """The usable training curves of a task, and a target at 90 % of the best reduction of the loss.

    Args:
        curves: Curves of finite losses below 5 that begin below 10.
        target: start - 0.9 (start - best), where start is the median first loss, best the 1st percentile of minima.
    """

    curves: Sequence[Sequence[float]]
    target: float

    @classmethod
    def of(cls, curves: Sequence[Sequence[float]]) -> "CurveSet":
        """Make the set from usable curves."""
        minima = sorted(min(curve) for curve in curves)
        best = minima[round(0.01 * (len(minima) - 1))]
        start = median(curve[0] for curve in curves)
        return cls(curves, start - 0.9 * (start - best))


def read_task(data: Path, number: int) -> CurveSet:
    """Read a task of TaskSet from `taskset_curves_8.npz`."""
    import numpy as np

    path = data / CURVES_FILE
    with reading(path), np.load(path) as file:
        train = file["train"]
    if not 0 <= number < len(train):
        raise ScenarioError(f"{path} has the tasks 0 to {len(train) - 1}, not {number}")
    curves = train[number].astype(float)
    usable = np.isfinite(curves).all(axis=1) & (curves[:, 0] < 10) & (np.nan_to_num(curves, nan=np.inf) < 5).all(axis=1)
    return CurveSet.of(curves[usable].tolist())
