"""Initial points: the configurations that a user wants tried first."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.algorithms.bohb import BOHB
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.repeated import Repeated
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.errors import AlgorithmError, ShoalError, SpaceError
from shoal.core.repeats import Repeats
from shoal.core.space import Space, choice, loguniform, randint
from shoal.core.trial import Config, Trial

SPACE = Space({"lr": loguniform(1e-4, 1e-1), "width": choice([16, 32]), "optimizer": {"momentum": choice([0.0, 0.9])}})
DISCRETE = Space({"width": choice([16, 32, 64]), "depth": randint(1, 4)})

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "random": lambda: Random(n=6, epochs=1),
    "random, grouped": lambda: Random(n=6, epochs=1, group_by=["width"]),
    "successive_halving": lambda: SuccessiveHalving(n=6, max_epochs=9),
    "hyperband": lambda: Hyperband(max_epochs=9),
    "bohb": lambda: BOHB(max_epochs=9),
    "asha": lambda: ASHA(n=6, max_epochs=9),
    "asha, grouped": lambda: ASHA(n=6, max_epochs=9, group_by=["width"]),
    "asha, tpe": lambda: ASHA(n=6, max_epochs=9, sampler="tpe"),
    "median": lambda: Median(n=6, epochs=3),
    "pbt": lambda: PBT(n=6, epochs=2),
    "optuna": lambda: OptunaSearch(n=6, epochs=1),
    "optuna, random": lambda: OptunaSearch(n=6, epochs=1, sampler="random"),
}


def _first(algorithm: Algorithm, initial: list[Config], space: Space = SPACE) -> list[Trial]:
    algorithm.bind(space, metric="loss", mode="min", seed=3, initial=initial)
    trials = [trial for group in algorithm.next_groups(9) for trial in group.trials]
    return sorted(trials, key=lambda trial: trial.number)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_initial_points_are_the_first_trials_and_partial_ones_are_completed(name: str) -> None:
    initial: list[Config] = [
        {"lr": 0.001, "width": 16, "optimizer": {"momentum": 0.9}},
        {"optimizer": {"momentum": 0.0}},
    ]
    trials = _first(ALGORITHMS[name](), initial)
    random = _first(Random(n=6, epochs=1), [])
    assert trials[0].config == initial[0]
    assert trials[1].config == {**random[1].config, "optimizer": {"momentum": 0.0}}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "tpe" not in name and "optuna" not in name])
def test_the_other_trials_keep_their_numbers_and_configurations(name: str) -> None:
    initial = [trial.config for trial in _first(Random(n=2, epochs=1), [{"lr": 0.05}, {"lr": 0.06}])]
    without = {trial.number: trial.config for trial in _first(ALGORITHMS[name](), [])}
    found = {trial.number: trial.config for trial in _first(ALGORITHMS[name](), initial)}
    others = {number: config for number, config in without.items() if number > 1}
    if "grouped" in name:
        random = [trial.config for trial in _first(Random(n=6, epochs=1), [])][2:]
        others = dict(enumerate(sorted(random, key=lambda config: config["width"] != random[0]["width"]), start=2))
    assert {number: config for number, config in found.items() if number > 1} == others


def test_a_grid_tries_them_first_and_not_twice() -> None:
    whole = [trial.config for trial in _first(Grid(epochs=1), [], DISCRETE)]
    trials = [trial.config for trial in _first(Grid(epochs=1), [{"width": 64, "depth": 2}], DISCRETE)]
    assert trials[0] == {"width": 64, "depth": 2}
    assert trials[1:] == [config for config in whole if config != trials[0]]


@pytest.mark.parametrize("given", [1.0, True], ids=repr)  # a given 1 may stand for 1.0, as JavaScript writes it
def test_a_grid_tells_equal_values_of_different_types_apart(given: object) -> None:
    space = Space({"x": choice([1, 1.0, True]), "y": choice([{"z": 0}, {"z": False}])})
    trials = [trial.config for trial in _first(Grid(epochs=1), [{"x": given, "y": {"z": False}}], space)]
    assert repr(trials[0]) == repr({"x": given, "y": {"z": False}})
    assert sorted(map(repr, trials)) == sorted(map(repr, space.grid()))


def test_all_repeats_of_a_configuration_have_its_initial_point() -> None:
    trials = _first(Repeated(Random(n=2, epochs=1), Repeats(3)), [{"lr": 0.02}])
    assert [trial.config["lr"] for trial in trials][:3] == [0.02] * 3
    assert trials[3].config["lr"] != 0.02


@pytest.mark.parametrize(
    ("initial", "error", "words"),
    [
        ([{"lr": 1.0}], SpaceError, "initial point 0: `lr` is given as 1.0, and the space has"),
        ([{}, {"rate": 1.0}], SpaceError, "initial point 1: `rate` is given, and is not in the space, which has lr"),
        (
            [{"lr": i / 100} for i in range(1, 8)],
            AlgorithmError,
            r"Random\(n=6, epochs=1\) has 6 trials, too few for 7 initial points",
        ),
    ],
)
def test_what_is_refused(initial: list[Config], error: type[ShoalError], words: str) -> None:
    with pytest.raises(error, match=words):
        _first(Random(n=6, epochs=1), initial)


def test_equal_points_are_refused() -> None:
    point: dict[str, Any] = {"width": 16, "depth": 2}
    with pytest.raises(SpaceError, match=r"initial points 0 and 2 are equal: {'width': 16, 'depth': 2}"):
        _first(Grid(epochs=1), [point, {"width": 32, "depth": 2}, dict(point)], DISCRETE)


def test_a_population_begins_with_them() -> None:
    with pytest.raises(AlgorithmError, match="begins with 2 members, too few for 3 initial points"):
        _first(PBT(n=2, epochs=4), [{"lr": 0.001}, {"lr": 0.002}, {"lr": 0.003}])
