"""Finished trials of earlier studies in the models of a new search."""

import math
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState as Shown

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm, Problem
from shoal.algorithms.bohb import BOHB, SyncBOHB
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.algorithms.projection import Projection
from shoal.algorithms.random import Random
from shoal.algorithms.repeated import Repeated
from shoal.algorithms.rules import Threshold
from shoal.algorithms.stop_rules import StopRules
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.constraint import parse_constraints
from shoal.core.repeats import Repeats
from shoal.core.space import Space, uniform
from shoal.core.trial import EarlierTrial, Trial, derive_seed

LINE = Space({"x": uniform(0, 1)})


def valley(epochs: int, count: int = 40, bottom: float = 0.7) -> list[EarlierTrial]:
    """Earlier trials whose loss is the distance to the bottom of a valley."""
    places = [derive_seed("place", number) / 2**63 for number in range(count)]
    return [EarlierTrial({"x": x}, {epochs: {"loss": abs(x - bottom)}}) for x in places]


def first_trials(algorithm: Algorithm, earlier: list[EarlierTrial], count: int) -> list[Trial]:
    algorithm.bind(LINE, metric="loss", mode="min", seed=1, earlier=earlier)
    trials = [trial for group in algorithm.next_groups(count) for trial in group.trials]
    return sorted(trials, key=lambda trial: trial.number)[:count]


LEARNERS: dict[str, Callable[[], Algorithm]] = {
    "optuna": lambda: OptunaSearch(8, epochs=3),
    "optuna, own sampler": lambda: OptunaSearch(
        8, epochs=3, sampler=lambda seed: optuna.samplers.TPESampler(seed=seed)
    ),
    "asha, tpe": lambda: ASHA(8, max_epochs=3, eta=3, sampler="tpe"),
    "bohb": lambda: BOHB(max_epochs=9, min_epochs=3, random_fraction=0),
    "sync_bohb, with a rule": lambda: StopRules(SyncBOHB(9, random_fraction=0), [Threshold(above=5.0)]),
    "repeats": lambda: Repeated(OptunaSearch(8, epochs=3), Repeats(2)),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_the_first_proposals_are_near_the_best_of_earlier_trials(name: str) -> None:
    def mean_distance(earlier: list[EarlierTrial]) -> float:
        trials = first_trials(LEARNERS[name](), earlier, 8)
        assert [trial.number for trial in trials] == list(range(len(trials)))
        return math.fsum(abs(trial.config["x"] - 0.7) for trial in trials) / len(trials)

    assert mean_distance(valley(3)) < 0.15 < 0.2 < mean_distance([])


BUDGETS: dict[str, tuple[Algorithm, list[int]]] = {
    "optuna": (OptunaSearch(8, epochs=5), [5]),
    "gp": (OptunaSearch(8, epochs=5, sampler="gp"), [5]),
    "generations of its own": (OptunaSearch(8, epochs=5, sampler="nsga2"), []),
    "no model": (OptunaSearch(8, epochs=5, sampler="random"), []),
    "asha, tpe": (ASHA(8, max_epochs=10, eta=3, sampler="tpe"), [1, 3, 9, 10]),
    "asha": (ASHA(8, max_epochs=10), []),
    "bohb": (BOHB(max_epochs=9), [1, 3, 9]),
    "wrapped": (StopRules(Repeated(SyncBOHB(max_epochs=4, eta=2), Repeats(2)), [Threshold(above=1.0)]), [1, 2, 4]),
    "random": (Random(8, epochs=5), []),
    "grid": (Grid(epochs=5), []),
    "halving": (SuccessiveHalving(8, max_epochs=9), []),
    "hyperband": (Hyperband(max_epochs=9), []),
    "pbt": (PBT(8, epochs=5), []),
    "median": (Median(8, epochs=5), []),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_the_epochs_at_which_they_count(name: str) -> None:
    algorithm, budgets = BUDGETS[name]
    assert list(algorithm.modelled_budgets) == budgets


@pytest.mark.parametrize("make", [LEARNERS["optuna"], LEARNERS["bohb"]])
def test_values_at_other_epochs_do_not_count(make: Callable[[], Algorithm]) -> None:
    assert first_trials(make(), valley(2), 8) == first_trials(make(), [], 8)


def test_initial_points_stay_the_first_trials() -> None:
    algorithm = OptunaSearch(3, epochs=3)
    algorithm.bind(LINE, metric="loss", mode="min", seed=1, initial=[{"x": 0.1}], earlier=valley(3))
    trials = [trial for group in algorithm.next_groups(3) for trial in group.trials]
    assert (trials[0].number, trials[0].config) == (0, {"x": 0.1})


def shown(earlier: list[EarlierTrial], **problem: Any) -> list[optuna.trial.FrozenTrial]:
    found = Projection(
        Problem(LINE, "loss", "min", 0, None, **problem), optuna.samplers.TPESampler(seed=0), "tpe", (1, 3)
    )
    for each in earlier:
        found.add_earlier(each)
    return found._study.get_trials(deepcopy=False)


def test_what_the_sampler_sees_of_each() -> None:
    """Ten trials at three epochs make that the modelled budget: a trial that was stopped before is no better than they,
    and one that was to end before is unknown.
    """
    at_end = [EarlierTrial({"x": i / 20}, {1: {"loss": 5.0}, 3: {"loss": 1 + i / 10}}) for i in range(10)]
    others = [
        EarlierTrial({"x": 0.6}, {1: {"loss": 0.5}}, stopped=True),
        EarlierTrial({"x": 0.7}, {1: {"loss": 0.5}}),
        EarlierTrial({"x": 0.8}, {3: {"loss": float("nan")}}),
        EarlierTrial({"x": 0.9}, {2: {"loss": 0.5}}),
    ]
    trials = shown(at_end + others)
    assert [trial.values for trial in trials[:10]] == [[1 + i / 10] for i in range(10)]
    assert [(trial.state, trial.values) for trial in trials[10:]] == [
        (Shown.COMPLETE, [1.9]),
        (Shown.WAITING, None),
        (Shown.FAIL, None),
        (Shown.WAITING, None),
    ]


def test_their_constraints_are_shown() -> None:
    (trial,) = shown(
        [EarlierTrial({"x": 0.5}, {1: {"loss": 1.0, "ms": 14.0}})], constraints=parse_constraints({"ms": "<= 10"})
    )
    assert trial.constraints == {"ms <= 10": pytest.approx(0.4)}
