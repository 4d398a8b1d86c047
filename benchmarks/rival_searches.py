"""Searches of other libraries, as `surrogates.Search`: schedulers of Syne Tune, samplers and pruners of Optuna.

Both want finite losses; one that diverges is reported as `WORST`. Random trials are those of Shoal's searches.
"""

from copy import deepcopy
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import optuna
from surrogates import EPOCHS, RANGES, Numbers, random_place

WORST = 1e9
KNOWN = 1000
"""Random trials that Syne Tune is given in advance."""

NAMES = list(RANGES)


class SyneTune:
    """A scheduler of `syne_tune.optimizer.baselines` by name; with `is_random` it tries the random trials."""

    def __init__(self, name: str, seed: int, *, is_random: bool, brackets: int = 1) -> None:
        from syne_tune.config_space import uniform
        from syne_tune.optimizer import baselines

        np.random.seed(seed)  # of which it draws brackets, and what its density lacks
        points = [dict(zip(NAMES, map(float, random_place(seed, n)), strict=True)) for n in range(KNOWN * is_random)]
        self._scheduler = getattr(baselines, name)(
            dict.fromkeys(NAMES, uniform(0, 1)),
            metric="loss",
            time_attr="epoch",
            max_t=EPOCHS,
            brackets=brackets,
            random_seed=seed,
            points_to_evaluate=points or None,
        )
        self._trials: list[Any] = []

    def ask(self) -> tuple[int, Numbers]:
        from syne_tune.backend.trial_status import Trial

        trial = Trial(len(self._trials), self._scheduler.suggest().config, datetime(2020, 1, 1))
        self._trials.append(trial)
        self._scheduler.on_trial_add(trial)
        return trial.trial_id, np.array([trial.config[name] for name in NAMES])

    def tell(self, number: int, epoch: int, loss: float) -> list[int]:
        trial, result = self._trials[number], {"loss": min(loss, WORST), "epoch": epoch}
        if epoch == EPOCHS:
            self._scheduler.on_trial_complete(trial, result)
            return [number]
        return [] if self._scheduler.on_trial_result(trial, result) == "CONTINUE" else [number]


class Optuna:
    """A study with TPE, or with the random trials, and a pruner that is asked after each epoch."""

    def __init__(self, pruner: optuna.pruners.BasePruner, seed: int, *, is_random: bool, epochs: int = EPOCHS) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed)
        self._study = optuna.create_study(study_name=str(seed), sampler=sampler, pruner=deepcopy(pruner))
        self._random = partial(random_place, seed) if is_random else None
        self._epochs = epochs
        self._space = dict.fromkeys(NAMES, optuna.distributions.FloatDistribution(0, 1))
        self._trials: list[optuna.Trial] = []

    def ask(self) -> tuple[int, Numbers]:
        number = len(self._trials)
        if self._random is not None:
            self._study.enqueue_trial(dict(zip(NAMES, map(float, self._random(number)), strict=True)))
        trial = self._study.ask(self._space)
        self._trials.append(trial)
        return number, np.array([trial.params[name] for name in NAMES])

    def tell(self, number: int, epoch: int, loss: float) -> list[int]:
        trial = self._trials[number]
        trial.report(min(loss, WORST), epoch)
        if epoch == self._epochs:
            self._study.tell(trial, min(loss, WORST))
        elif trial.should_prune():
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            return []
        return [number]
