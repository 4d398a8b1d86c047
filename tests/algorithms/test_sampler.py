"""Samplers that cannot handle what they are asked are refused before anything is trained; warnings are kept."""

import logging
import warnings
from importlib.util import find_spec as find

import optuna
import pytest

from shoal.algorithms import sampler as module
from shoal.algorithms.asha import ASHA
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.core.errors import AlgorithmError, SpaceError
from shoal.core.space import Space, choice, loguniform, randint, uniform
from shoal.core.trial import Report, TrialState

CHOICES = {"act": choice(["relu", "tanh"]), "width": choice([1, 2])}
NESTED = {"lr": uniform(0, 1), "net": choice([{"kind": "mlp", "width": randint(1, 65)}, {"kind": "linear"}])}
MIXED = {"lr": loguniform(1e-4, 1), "width": randint(1, 65), "act": choice(["relu", "tanh"])}
NUMBERS = {"lr": loguniform(1e-4, 1), "width": randint(1, 65)}
CONSTANT = {"lr": 0.1, "act": choice(["relu"])}
SPACES = {"choices": CHOICES, "nested": NESTED, "mixed": MIXED, "numbers": NUMBERS, "constant": CONSTANT}


@pytest.fixture
def everything_installed(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: find("json"))


def bind(sampler, space, *, metric="loss", mode="min", make=OptunaSearch):
    if make is ASHA:
        algorithm = ASHA(n=30, max_epochs=9, sampler=sampler)
    else:
        algorithm = OptunaSearch(n=30, epochs=1, sampler=sampler)
    algorithm.bind(Space(space), metric=metric, mode=mode, seed=0)
    return algorithm


SEARCHED = {
    "tpe": {},
    "random": {},
    "gp": {"nested": "`net[0].width`"},
    "qmc": {"nested": "`net[0].width`"},
    "nsga2": {"nested": "`net[0].width`"},
    "cmaes": {"mixed": "`act`", "choices": SpaceError, "nested": SpaceError},
}
"""Each sampler accepts a space silently, warns about parameters that it ignores, or raises an error."""


@pytest.mark.parametrize("make", [OptunaSearch, ASHA])
@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.usefixtures("everything_installed")
def test_what_a_sampler_makes_of_a_space(name, space, make, caplog):
    outcome = SEARCHED[name].get(space)
    if outcome is SpaceError:
        with pytest.raises(SpaceError, match="sampler 'cmaes'"):
            bind(name, SPACES[space], make=make)
        return
    bind(name, SPACES[space], make=make)
    expected = [] if outcome is None else [f"sampler '{name}' does not model {outcome}, which it draws at random"]
    assert [record.getMessage().split(";")[0] for record in caplog.records] == expected


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            CHOICES,
            "`act`: sampler 'cmaes' searches numbers, and this space has only choices, which it would draw at random; "
            "use sampler 'tpe', which searches every space",
        ),
        (
            NESTED,
            "`net[0].width`: sampler 'cmaes' cannot search randint(1, 65) that exists for some options only; "
            "use sampler 'tpe', which searches every space",
        ),
    ],
    ids=["choices", "nested"],
)
@pytest.mark.usefixtures("everything_installed")
def test_the_parameter_and_the_remedy_are_named(space, message):
    with pytest.raises(SpaceError) as error:
        bind("cmaes", space)
    assert str(error.value) == message


@pytest.mark.parametrize(("name", "package"), [("cmaes", "cmaes"), ("qmc", "scipy"), ("gp", "scipy")])
def test_a_package_that_is_missing_is_missed_at_once(name, package, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda asked: None if asked == package else find("json"))
    with pytest.raises(AlgorithmError) as error:
        bind(name, NUMBERS)
    assert str(error.value) == f"sampler '{name}' needs {package}. Install it with: pip install {package}"


@pytest.mark.parametrize("name", ["tpe", "gp", "qmc", "nsga2", "random"])
def test_samplers_that_take_several_metrics(name):
    algorithm = OptunaSearch(n=12, epochs=1, sampler=name, concurrency=1)
    algorithm.bind(Space(NUMBERS), metric=["loss", "width"], mode=["min", "max"], seed=0)
    configs = []
    while groups := algorithm.next_groups(1):
        (trial,) = groups[0].trials
        configs.append(str(trial.config))
        metrics = {"loss": trial.config["lr"], "width": float(trial.config["width"])}
        algorithm.observe(Report(trial.number, 1, metrics, state=TrialState.PAUSED))
    assert len(set(configs)) == 12


@pytest.mark.usefixtures("everything_installed")
def test_a_sampler_that_takes_one_metric():
    with pytest.raises(AlgorithmError) as error:
        bind("cmaes", NUMBERS, metric=["loss", "seconds"], mode=["min", "min"])
    assert str(error.value) == "sampler 'cmaes' takes one metric, got ['loss', 'seconds']; use 'nsga2', 'tpe' or 'gp'"


class FailsLate(optuna.samplers.RandomSampler):
    """Like a model that is made when there is something to model."""

    def sample_independent(self, study, trial, name, distribution):
        if len(study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))) >= 10:
            raise KeyError("no kernel for this")
        return super().sample_independent(study, trial, name, distribution)


class FailsWhenTold(optuna.samplers.RandomSampler):
    def after_trial(self, study, trial, state, values):
        raise RuntimeError("cannot take notes")


ONE = optuna.samplers.RandomSampler(seed=0)


def broken(seed):
    return {}["seed"]


@pytest.mark.parametrize("make", [OptunaSearch, ASHA])
@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda seed: FailsLate(seed=seed), r"cannot search `lr` loguniform.* by loss: KeyError: 'no kernel for this'"),
        (lambda seed: FailsWhenTold(seed=seed), "RuntimeError: cannot take notes. Choose another sampler, such as"),
        (lambda seed: optuna.samplers.GridSampler({"rate": [1]}, seed=seed), "parameter name, lr, is not found in"),
        (lambda seed: None, "must be a function that makes an Optuna sampler of a seed, but .* returned None"),
        (lambda seed: ONE, "must make a new sampler whenever it is called"),
        (
            lambda seed: optuna.samplers.TPESampler(),
            r"the same again for the same seed.*; pass the seed on: lambda seed: TPESampler\(seed=seed\)$",
        ),
        (optuna.samplers.TPESampler, r"the same again for the same seed.*: lambda seed: TPESampler\(seed=seed\)$"),
        (
            optuna.samplers.NSGAIISampler,
            r"NSGAIISampler'> raised TypeError: .*Give one such as lambda seed: NSGAIISampler\(seed=seed\)$",
        ),
        (
            broken,
            r"<function broken.* raised KeyError: 'seed'\. Give one such as lambda seed: NSGAIISampler\(seed=seed\)$",
        ),
    ],
    ids=["late", "told", "grid", "none", "same", "seedless", "class", "class that raises", "raises"],
)
def test_a_sampler_of_one_s_own_is_tried_out_first(sampler, words, make):
    with pytest.raises(AlgorithmError, match=words):
        bind(sampler, NUMBERS, make=make)


def test_a_grid_of_optuna_s_is_searched_to_its_end():
    grid = {"act": ["relu", "tanh"], "width": [1, 2]}
    algorithm = OptunaSearch(4, 1, lambda seed: optuna.samplers.GridSampler(grid, seed=seed), concurrency=4)
    algorithm.bind(Space(CHOICES), metric="loss", mode="min", seed=0)
    (group,) = algorithm.next_groups(4)
    assert len({str(trial.config) for trial in group.trials}) == 4


class Warns(optuna.samplers.RandomSampler):
    def before_trial(self, study, trial):
        warnings.warn("there is a better way", UserWarning, stacklevel=1)


def test_warnings_of_optuna_are_kept_and_are_not_errors(caplog):
    """They are errors to everybody else in this process, see pyproject.toml."""

    def make(seed):
        warnings.warn("this is experimental", optuna.exceptions.ExperimentalWarning, stacklevel=1)
        return Warns(seed=seed)

    with caplog.at_level(logging.WARNING, "shoal.algorithms"):
        algorithm = OptunaSearch(5, 1, make, concurrency=5)
        algorithm.bind(Space(NUMBERS), metric="loss", mode="min", seed=0)
        caplog.clear()
        algorithm.next_groups(5)
    assert [record.getMessage() for record in caplog.records] == ["Optuna warns: UserWarning: there is a better way"]
    with caplog.at_level(logging.WARNING, "shoal.algorithms"):
        OptunaSearch(5, 1, make).bind(Space(NUMBERS), metric="loss", mode="min", seed=0)
    assert "Optuna warns: ExperimentalWarning: this is experimental" in [x.getMessage() for x in caplog.records]
