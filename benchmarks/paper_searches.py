"""The searches that `regret.py` compares with: pseudo-code of the papers, done the slow way, and Syne Tune's classes.

Each is asked for jobs and told what came of them: a job is the number of a trial, its place in the unit cube, and the
epoch up to which it is trained. Nothing here is taken from `shoal`. A loss that is NaN is infinite.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Place = NDArray[Any]
"""D numbers between 0 and 1."""
Draw = Callable[[int], Place]
"""Number of a trial -> its random place."""
Job = tuple[int, Place, int]


class Search(Protocol):
    def ask(self) -> Job | None:
        """The next job; None while there is none."""

    def tell(self, number: int, epoch: int, loss: float) -> None:
        """A trial got to the end of its job."""


class PaperASHA:
    """Li et al. 2020, Algorithm 2: `get_job`, and rungs that are sorted anew each time."""

    def __init__(self, most: int, eta: int, draw: Draw) -> None:
        self._eta, self._draw = eta, draw
        self._budgets = [eta**k for k in range(round(math.log(most, eta)) + 1)]
        self._rungs: list[dict[int, float]] = [{} for _ in self._budgets]
        self._promoted: list[set[int]] = [set() for _ in self._budgets]
        self._places: list[Place] = []

    def ask(self) -> Job:
        for k in reversed(range(len(self._budgets) - 1)):
            rung = self._rungs[k]
            candidates = sorted(rung, key=lambda number: (rung[number], number))[: len(rung) // self._eta]
            promotable = [number for number in candidates if number not in self._promoted[k]]
            if promotable:
                self._promoted[k].add(promotable[0])
                return promotable[0], self._places[promotable[0]], self._budgets[k + 1]
        self._places.append(self._draw(len(self._places)))
        return len(self._places) - 1, self._places[-1], self._budgets[0]

    def tell(self, number: int, epoch: int, loss: float) -> None:
        self._rungs[self._budgets.index(epoch)][number] = loss


def hyperband_table(most: int, eta: int) -> list[list[tuple[int, int]]]:
    """Li et al. 2018, Algorithm 1: for s = s_max ... 0 the trials and epochs of each rung."""
    s_max = round(math.log(most, eta))
    table = []
    for s in range(s_max, -1, -1):
        n = math.ceil((s_max + 1) / (s + 1) * eta**s - 1e-9)
        table.append([(math.floor(n * eta**-i + 1e-9), round(most * eta ** (i - s))) for i in range(s + 1)])
    return table


class PaperHyperband:
    """Li et al. 2018, Algorithm 1, for one worker: bracket after bracket, and rung after rung in each."""

    def __init__(self, most: int, eta: int, draw: Draw) -> None:
        self._draw = draw
        self._steps = self._run(hyperband_table(most, eta))
        self._job = next(self._steps, None)

    def _run(self, table: list[list[tuple[int, int]]]) -> Any:
        number = 0
        for rungs in table:
            trials = list(range(number, number + rungs[0][0]))
            number += len(trials)
            for i, (_, epochs) in enumerate(rungs):
                losses = {}
                for trial in trials:
                    losses[trial] = yield trial, self._draw(trial), epochs
                keep = rungs[i + 1][0] if i + 1 < len(rungs) else 0
                trials = sorted(sorted(trials, key=lambda trial: (losses[trial], trial))[:keep])

    def ask(self) -> Job | None:
        job, self._job = self._job, None
        return job

    def tell(self, number: int, epoch: int, loss: float) -> None:
        try:
            self._job = self._steps.send(loss)
        except StopIteration:
            self._job = None


Observed = list[tuple[float, int, Place]]
Propose = Callable[[Observed, int], Place | None]
"""(loss, number and place of all trials at the budget of the model, number of the new trial) -> its place; None is a
random one."""


class PaperBOHB:
    """Falkner et al. 2018, Algorithms 1 and 2 and section 3.4: brackets of Hyperband in parallel.

    The next bracket begins when the last has sampled all of its trials; promotion waits for the whole rung.

    Args:
        most: epochs.
        eta: of Hyperband.
        draw: random places.
        propose: the model, asked once a budget has N_min + 2 trials.
        enough: how many those are.
        whole: whether a bracket samples all of its trials when it begins, as Shoal does it, or one whenever a worker
            is free, as the paper has it.
    """

    def __init__(self, most: int, eta: int, draw: Draw, propose: Propose, enough: int, *, whole: bool = False) -> None:
        self._table = hyperband_table(most, eta)
        self._draw, self._propose, self._enough, self._whole = draw, propose, enough, whole
        self._places: list[Place] = []
        self._home: list[int] = []
        self._waiting: list[deque[int]] = []
        self._rung: list[int] = []
        self._losses: list[dict[int, float]] = []
        self._observed: dict[int, Observed] = {}

    def ask(self) -> Job:
        for bracket, waiting in enumerate(self._waiting):
            rungs = self._rungs(bracket)
            if not waiting and self._home.count(bracket) < rungs[0][0]:
                self._sample(bracket)
            if waiting:
                number = waiting.popleft()
                return number, self._places[number], rungs[self._rung[bracket]][1]
        self._waiting.append(deque())
        self._rung.append(0)
        self._losses.append({})
        bracket = len(self._waiting) - 1
        for _ in range(self._rungs(bracket)[0][0] if self._whole else 1):
            self._sample(bracket)
        number = self._waiting[bracket].popleft()
        return number, self._places[number], self._rungs(bracket)[0][1]

    def _rungs(self, bracket: int) -> list[tuple[int, int]]:
        return self._table[bracket % len(self._table)]

    def _sample(self, bracket: int) -> None:
        number = len(self._places)
        known = [budget for budget, observed in self._observed.items() if len(observed) >= self._enough]
        place = self._propose(self._observed[max(known)], number) if known else None
        self._places.append(self._draw(number) if place is None else place)
        self._home.append(bracket)
        self._waiting[bracket].append(number)

    def tell(self, number: int, epoch: int, loss: float) -> None:
        self._observed.setdefault(epoch, []).append((loss, number, self._places[number]))
        bracket = self._home[number]
        rungs, losses = self._rungs(bracket), self._losses[bracket]
        losses[number] = loss
        if len(losses) < rungs[self._rung[bracket]][0] or self._rung[bracket] + 1 == len(rungs):
            return
        self._rung[bracket] += 1
        keep = rungs[self._rung[bracket]][0]
        best = sorted(losses, key=lambda trial: (losses[trial], trial))[:keep]
        self._waiting[bracket].extend(sorted(best))
        losses.clear()


def paper_model(stream: Callable[[int], Random], *, cut_off: bool) -> Propose:
    """Falkner et al. 2018, Algorithm 2, one candidate after the other.

    Args:
        stream: random numbers for a trial.
        cut_off: whether kernels are cut off at 0 and 1, as candidates always are, or not, as in the paper's densities.
    """

    def density(places: Place) -> Callable[[Place], float]:
        widths = np.maximum(1.06 * places.std(axis=0) * len(places) ** (-1 / (4 + places.shape[1])), 1e-3)
        share = normal((1 - places) / widths) - normal(-places / widths) if cut_off else np.ones_like(places)

        def at(place: Place) -> float:
            kernels = np.exp(-0.5 * ((place - places) / widths) ** 2) / (widths * math.sqrt(2 * math.pi))
            return float((kernels / share).prod(axis=1).mean())

        return at

    def propose(observed: Observed, number: int) -> Place | None:
        rng = stream(number)
        if rng.random() < 1 / 3:
            return None
        ranking = [place for _, _, place in sorted(observed, key=lambda trial: trial[:2])]
        n, d = len(ranking), len(ranking[0])
        good = max(d + 1, int(0.15 * n))
        best, worst = np.array(ranking[:good]), np.array(ranking[-max(d + 1, n - good) :])
        widths = np.maximum(1.06 * best.std(axis=0) * good ** (-1 / (4 + d)), 1e-3)
        good_density, bad_density = density(best), density(worst)
        found: Place | None = None
        most = -math.inf
        for _ in range(64):
            centre = best[rng.randrange(good)]
            candidate = np.array([inside(rng, x, 3 * width) for x, width in zip(centre, widths, strict=True)])
            ratio = max(good_density(candidate), 1e-32) / max(bad_density(candidate), 1e-32)
            if ratio > most:
                found, most = candidate, ratio
        return found

    return propose


def normal(z: Place) -> Place:
    """The cumulative normal distribution."""
    return np.array([[0.5 * math.erfc(-x / math.sqrt(2)) for x in row] for row in z])


def inside(rng: Random, mean: float, width: float) -> float:
    """A normal number in [0, 1]."""
    while True:
        value = rng.gauss(mean, width)
        if 0 <= value <= 1:
            return value


def syne_model(stream: Callable[[int], Random]) -> Propose:
    """The density of Syne Tune's `KernelDensityEstimator`, which is given the same observations."""
    from syne_tune.config_space import uniform
    from syne_tune.optimizer.schedulers.searchers.kde.kde_searcher import KernelDensityEstimator

    def propose(observed: Observed, number: int) -> Place | None:
        rng = stream(number)
        if rng.random() < 1 / 3:
            return None
        names = [str(dimension) for dimension in range(len(observed[0][2]))]
        seed = rng.randrange(2**32)
        np.random.seed(seed)  # where it has too few observations it draws from the global generator
        model = KernelDensityEstimator(
            dict.fromkeys(names, uniform(0, 1)),
            num_min_data_points=len(names) + 1,
            random_fraction=0.0,
            random_seed=seed,
        )
        model.X = [list(place) for _, _, place in observed]
        model.y = [min(loss, 1e9) for loss, _, _ in observed]
        suggested = model.suggest()
        return np.array([suggested[name] for name in names])

    return propose


class SyneTune:
    """A scheduler of Syne Tune's that says after each epoch whether a trial goes on.

    Args:
        make: the scheduler, of its space, of random places in the order of trials, and of a seed.
        most: epochs.
        draw: places for its first trials, if it takes any.
        known: how many those are.
        dimensions: of the space.
        seed: of its own.
    """

    def __init__(self, make: str, most: int, draw: Draw, known: int, dimensions: int, seed: int) -> None:
        from syne_tune.config_space import uniform
        from syne_tune.optimizer import baselines

        logging.getLogger("syne_tune").setLevel(logging.ERROR)
        np.random.seed(seed)
        self._names = [str(dimension) for dimension in range(dimensions)]
        points = [dict(zip(self._names, map(float, draw(number)), strict=True)) for number in range(known)]
        self._scheduler = getattr(baselines, make)(
            dict.fromkeys(self._names, uniform(0, 1)),
            metric="loss",
            time_attr="epoch",
            max_t=most,
            random_seed=seed,
            points_to_evaluate=points or None,
        )
        self._most = most
        self._trials: list[Any] = []
        self._going: deque[Job] = deque()

    def ask(self) -> Job:
        from datetime import datetime

        from syne_tune.backend.trial_status import Trial

        if self._going:
            return self._going.popleft()
        config = self._scheduler.suggest().config
        trial = Trial(len(self._trials), config, datetime(2020, 1, 1))
        self._trials.append(trial)
        self._scheduler.on_trial_add(trial)
        return trial.trial_id, self._place(trial), 1

    def _place(self, trial: Any) -> Place:
        return np.array([trial.config[name] for name in self._names])

    def tell(self, number: int, epoch: int, loss: float) -> None:
        trial = self._trials[number]
        result = {"loss": min(loss, 1e9), "epoch": epoch}
        if epoch == self._most:
            self._scheduler.on_trial_complete(trial, result)
        elif self._scheduler.on_trial_result(trial, result) == "CONTINUE":
            self._going.append((number, self._place(trial), epoch + 1))
