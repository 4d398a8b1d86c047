"""Searches on recorded loss curves: what a search proposes costs no training, so thousands of searches take minutes.

The curves are those of eight tasks of TaskSet (Metz et al. 2020): 1000 configurations of eight hyper-parameters, 27
epochs each. A search proposes in the unit cube of the logarithms of those hyper-parameters and gets the curve of the
nearest configuration in the table.
"""

import heapq
import math
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.algorithms import Algorithm
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.objective import Objective
from shoal.core.space import Space, loguniform
from shoal.core.trial import Config, Report, TrialState, derive_seed
from shoal.simulate.workload import CURVES_FILE

EPOCHS = 27
ETA = 3

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

Numbers = NDArray[Any]


def place_of(config: Config) -> Numbers:
    """Place of a configuration in the unit cube."""
    low, high = np.log(np.array(list(RANGES.values()))).T
    place: Numbers = (np.log([config[name] for name in RANGES]) - low) / (high - low)
    return place


def random_place(seed: int, number: int) -> Numbers:
    """Place of a random trial, the same for all searches of a seed."""
    return place_of(SPACE.sample(derive_seed(seed, "config", number)))


@dataclass(frozen=True)
class Table:
    """A task: places of its configurations, losses of shape [configurations, epochs + 1], and the ends of regret."""

    places: Numbers
    losses: Numbers
    least: float
    start: float

    def curve(self, place: Numbers) -> Numbers:
        """Losses of the nearest configuration, from before training on; infinite where it diverges."""
        losses = self.losses[((self.places - place) ** 2).sum(axis=1).argmin()]
        return np.where(np.isfinite(losses), losses, math.inf)

    def regrets(self, search: "Search", workers: int, budget: int) -> list[float]:
        """Regret after each epoch of a search, which may end before its budget is spent."""
        losses = losses_of(search, lambda _, place: self.curve(place), workers, budget)
        best = np.minimum.accumulate(np.minimum(losses, self.start))
        return ((best - self.least) / (self.start - self.least)).tolist()  # type: ignore[no-any-return]


@cache
def tables(data: Path) -> list[Table]:
    """The tasks of TaskSet, from the file in a folder."""
    with np.load(data / CURVES_FILE) as file:
        settings, losses = file["hp"], file["valid"][:, :, : EPOCHS + 1].astype(float)
    settings[..., 1:3] = 1 - settings[..., 1:3]
    found = []
    for own, curves in zip(settings, losses, strict=True):
        places = np.array([place_of(dict(zip(RANGES, row, strict=True))) for row in own])
        found.append(Table(places, curves, float(np.nanmin(curves[:, 1:])), float(np.nanmedian(curves[:, 0]))))
    return found


class Search(Protocol):
    """A search whose trials are trained epoch by epoch."""

    def ask(self) -> tuple[int, Numbers] | None:
        """Number and place of the next trial to train, a new or a paused one; None while there is none."""

    def tell(self, number: int, epoch: int, loss: float) -> Collection[int]:
        """Report an epoch; returns the trials that leave their workers."""


class ShoalSearch:
    """An algorithm of Shoal's that serves one trial at a time, in the order of numbers, as the engine does."""

    def __init__(self, algorithm: Algorithm, seed: int, space: Space = SPACE) -> None:
        algorithm = deepcopy(algorithm)
        of_best = EpochOrder((Objective("loss", "min"),)) if algorithm.models_best_epochs else LAST_EPOCHS
        algorithm.bind(space, metric="loss", mode="min", seed=seed, of_best=of_best)
        self._algorithm = algorithm
        self._places = place_of if space is SPACE else lambda _: np.array([])
        self._waiting: list[tuple[int, int, Config]] = []
        self._targets: dict[int, int] = {}

    def ask(self) -> tuple[int, Numbers] | None:
        for group in self._algorithm.next_groups(free=1):
            for trial in group.trials:
                heapq.heappush(self._waiting, (trial.number, group.budget.epochs, trial.config))
        if not self._waiting:
            return None
        number, self._targets[number], config = heapq.heappop(self._waiting)
        return number, self._places(config)

    def tell(self, number: int, epoch: int, loss: float) -> Collection[int]:
        is_last = epoch == self._targets[number]
        state = TrialState.PAUSED if is_last else TrialState.RUNNING
        decisions = self._algorithm.observe(Report(number, epoch, {"loss": loss}, state=state))
        return {decision.trial for decision in decisions} | ({number} if is_last else set())


def losses_of(
    search: Search, curve: Callable[[int, Numbers], Numbers], workers: int, budget: int = BEYOND**2
) -> list[float]:
    """Train a search, each epoch taking as long; returns the losses of all trials in the order of their reports.

    Args:
        curve: Number and place of a trial -> its losses from before training on, shape [epochs + 1].
        budget: Epochs of all trials together; fewer are trained if the search ends before.
    """
    curves: dict[int, Numbers] = {}
    reached: dict[int, int] = {}
    running: list[tuple[int, int, int]] = []  # (time, order, trial), a heap
    losses: list[float] = []
    order = now = 0
    while len(losses) < budget:
        while len(running) < workers and (job := search.ask()) is not None:
            number, place = job
            if number not in curves:
                curves[number] = curve(number, place)
            heapq.heappush(running, (now + 1, order, number))
            order += 1
        if not running:
            break
        now, began, number = heapq.heappop(running)
        epoch = reached[number] = reached.get(number, 0) + 1
        losses.append(float(curves[number][epoch]))
        heapq.heappush(running, (now + 1, began, number))
        if ended := search.tell(number, epoch, losses[-1]):
            running = [each for each in running if each[2] not in ended]
            heapq.heapify(running)
    return losses
