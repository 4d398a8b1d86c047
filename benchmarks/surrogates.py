"""Surrogate problems: tables of real loss curves, and the training of searches on them.

The curves are those of eight tasks of TaskSet (Metz et al. 2020): 1000 configurations of eight hyper-parameters, 27
epochs each. A search proposes in the unit cube of the logarithms of those hyper-parameters and gets the curve of the
nearest configuration in the table.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from paper_searches import Job, Place, Search

from shoal.algorithms import Algorithm
from shoal.core.space import Space, loguniform
from shoal.core.trial import Config, Report, Trial, TrialState
from shoal.simulate.workload import CURVES_FILE

EPOCHS = 27
ETA = 3
WORKERS = 8

BEYOND = 10**4
"""More trials and brackets than any budget lets begin."""

RANGES = {
    "learning_rate": (1e-8, 10),
    "1 - beta1": (1e-4, 1),
    "1 - beta2": (1e-6, 1),
    "epsilon": (1e-10, 1e3),
    "l1": (1e-8, 10),
    "l2": (1e-8, 10),
    "linear_decay": (1e-7, 1e-4),
    "exponential_decay": (1e-6, 1e-3),
}
"""From which TaskSet's configurations were drawn, by logarithms."""

SPACE = Space({name: loguniform(*bounds) for name, bounds in RANGES.items()})


def place_of(config: "dict[str, float]") -> Place:
    low, high = np.log(np.array(list(RANGES.values()))).T
    place: Place = (np.log([config[name] for name in RANGES]) - low) / (high - low)
    return place


@dataclass(frozen=True)
class Table:
    """A task: places of its configurations, losses of shape [configurations, epochs + 1], and the ends of regret."""

    places: Place
    losses: Place
    least: float
    start: float

    def curve(self, place: Place) -> Place:
        """Losses of the nearest configuration, from before training on; infinite where it diverges."""
        losses = self.losses[((self.places - place) ** 2).sum(axis=1).argmin()]
        return np.where(np.isfinite(losses), losses, math.inf)

    def regret(self, loss: float) -> float:
        return (min(loss, self.start) - self.least) / (self.start - self.least)


def tables(data: Path) -> list[Table]:
    with np.load(data / CURVES_FILE) as file:
        settings, losses = file["hp"], file["valid"][:, :, : EPOCHS + 1].astype(float)
    settings[..., 1:3] = 1 - settings[..., 1:3]
    found = []
    for own, curves in zip(settings, losses, strict=True):
        places = np.array([place_of(dict(zip(RANGES, row, strict=True))) for row in own])
        found.append(Table(places, curves, float(np.nanmin(curves[:, 1:])), float(np.nanmedian(curves[:, 0]))))
    return found


class Ours:
    """An algorithm of Shoal's, asked one job at a time: trials in the order of their numbers, as the engine does it.

    Args:
        settings: Further arguments of `Algorithm.bind`.
    """

    def __init__(self, algorithm: Algorithm, seed: int, **settings: Any) -> None:
        algorithm.bind(SPACE, metric="loss", mode="min", seed=seed, **settings)
        self._algorithm = algorithm
        self._waiting: list[tuple[int, int, Trial]] = []
        self.configs: dict[int, Config] = {}
        """Of the trials that have begun, by number."""

    def ask(self) -> Job | None:
        for group in self._algorithm.next_groups(free=1):
            for trial in group.trials:
                heapq.heappush(self._waiting, (trial.number, group.budget.epochs, trial))
        if not self._waiting:
            return None
        number, epochs, trial = heapq.heappop(self._waiting)
        self.configs[number] = trial.config
        return number, place_of(dict(trial.config)), epochs

    def tell(self, number: int, epoch: int, loss: float) -> None:
        self._algorithm.observe(Report(number, epoch, {"loss": loss}, state=TrialState.PAUSED))


def trained(
    search: Search, curve: Callable[[int, Place], Place], workers: int, budget: int
) -> Iterator[tuple[int, int, float]]:
    """Train a search, an epoch taking as long for all trials.

    Args:
        curve: Number and place of a trial -> its losses from before training on, shape [epochs + 1].
        budget: Epochs of all trials together; fewer are trained if the search ends before.

    Yields:
        The number of a trial, its newest epoch and the loss there, before the search is told of the end of a job.
    """
    curves: dict[int, Place] = {}
    reached: dict[int, int] = {}
    running: list[tuple[int, int, int, int]] = []  # (time, order, trial, last epoch), a heap
    spent = order = now = 0
    while spent < budget:
        while len(running) < workers and (job := search.ask()) is not None:
            number, place, epochs = job
            if number not in curves:
                curves[number] = curve(number, place)
            heapq.heappush(running, (now + 1, order, number, epochs))
            order += 1
        if not running:
            return
        now, began, number, epochs = heapq.heappop(running)
        epoch = reached[number] = reached.get(number, 0) + 1
        loss = float(curves[number][epoch])
        spent += 1
        yield number, epoch, loss
        if epoch == epochs:
            search.tell(number, epochs, loss)
        else:
            heapq.heappush(running, (now + 1, began, number, epochs))


def regrets(search: Search, table: Table, workers: int, budget: int) -> Place:
    """Regret after each epoch of the budget; the last one stays where the search ends before. Shape [budget]."""
    losses = [loss for _, _, loss in trained(search, lambda _, place: table.curve(place), workers, budget)]
    losses += losses[-1:] * (budget - len(losses))
    return np.array([table.regret(best) for best in np.minimum.accumulate(losses)])


@dataclass(frozen=True)
class Difference:
    """Mean regrets of two searches, and their difference and its standard error as parts of the other's mean."""

    ours: float
    other: float
    relative: float
    error: float

    @classmethod
    def of(cls, ours: Sequence[float], other: Sequence[float]) -> "Difference":
        mean = fmean(other)
        gaps = [one - two for one, two in zip(ours, other, strict=True)]
        return cls(fmean(ours), mean, fmean(gaps) / mean, stdev(gaps) / math.sqrt(len(gaps)) / mean)
