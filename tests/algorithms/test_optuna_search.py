"""Optuna's samplers as an algorithm: they propose what they would in a study of their own."""

import math

import optuna
import pytest

from shoal.algorithms.optuna_search import OptunaSearch
from shoal.core.epoch_order import EpochOrder
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective
from shoal.core.space import Space, choice, loguniform, quniform, randint, uniform
from shoal.core.trial import Report, TrialState

FLAT = {"lr": loguniform(1e-4, 1), "width": randint(1, 65), "rate": quniform(0.1, 0.9, 0.1), "kind": choice(["a", "b"])}
NESTED = {
    "lr": uniform(0, 1),
    "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 0.9)}, {"name": "adam", "momentum": 0.5}, "none"]),
    "layers": choice([[1, 2], [3]]),
    "flag": choice([True, 1, None]),
}


def bound(algorithm, space, mode="min"):
    algorithm.bind(Space(space), metric="loss", mode=mode, seed=5, data_seed=1)
    return algorithm


def loss_of(config):
    return (config["rate"] - 0.3) ** 2 + config["lr"] + config["width"] / 64 + (config["kind"] == "a")


def trained(algorithm, loss):
    """The configurations in their order, each trained before the next is asked for."""
    configs = []
    while groups := algorithm.next_groups(free=1):
        for trial in groups[0].trials:
            configs.append(trial.config)
            report = Report(
                trial.number, groups[0].budget.epochs, {"loss": loss(trial.config)}, state=TrialState.PAUSED
            )
            (decision,) = algorithm.observe(report)
            assert decision.state is TrialState.COMPLETE
    assert algorithm.finished
    return configs


@pytest.mark.parametrize(
    ("name", "kind"), [("tpe", optuna.samplers.TPESampler), ("random", optuna.samplers.RandomSampler)]
)
def test_it_proposes_what_the_sampler_does_by_itself(name, kind):
    options = {"constant_liar": True} if name == "tpe" else {}
    study = optuna.create_study(sampler=kind(seed=5, **options))
    expected = []
    for _ in range(30):
        trial = study.ask()
        config = {
            "lr": trial.suggest_float("lr", 1e-4, 1, log=True),
            "width": trial.suggest_int("width", 1, 64),
            "rate": trial.suggest_float("rate", 0.1, 0.9, step=0.1),
            "kind": trial.suggest_categorical("kind", ["a", "b"]),
        }
        study.tell(trial, loss_of(config))
        expected.append({**config, "rate": pytest.approx(config["rate"])})
    found = trained(bound(OptunaSearch(30, 2, name, concurrency=1), FLAT), loss_of)
    assert found == expected
    assert {config["rate"] for config in found} <= {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}


def test_it_learns():
    found = [loss_of(config) for config in trained(bound(OptunaSearch(60, 1, concurrency=1), FLAT), loss_of)]
    assert sum(found[40:]) < 0.6 * sum(found[:20])


def test_options_may_hold_parameters_of_their_own():
    configs = trained(bound(OptunaSearch(40, 1, concurrency=1), NESTED), lambda config: config["lr"])
    assert {str(config["optimizer"]) for config in configs if config["optimizer"] == "none"} == {"none"}
    by_name = {}
    for config in configs:
        if config["optimizer"] != "none":
            by_name.setdefault(config["optimizer"]["name"], set()).add(config["optimizer"]["momentum"])
    assert by_name["adam"] == {0.5}
    assert len(by_name["sgd"]) > 1
    assert {tuple(config["layers"]) for config in configs} == {(1, 2), (3,)}
    assert {repr(config["flag"]) for config in configs} <= {"True", "1", "None"}


def test_no_more_at_a_time_than_it_may():
    algorithm = bound(OptunaSearch(5, 1, "random", concurrency=3), FLAT)
    (group,) = algorithm.next_groups(free=100)
    assert [trial.number for trial in group.trials] == [0, 1, 2]
    assert algorithm.next_groups(free=100) == []
    algorithm.observe(Report(1, 1, {"loss": float("nan")}, state=TrialState.PAUSED))
    (group,) = algorithm.next_groups(free=1)
    assert [trial.number for trial in group.trials] == [3]


def test_a_sampler_of_one_s_own():
    algorithm = OptunaSearch(4, 1, lambda seed: optuna.samplers.RandomSampler(seed=seed + 1), concurrency=2)
    other = OptunaSearch(4, 1, "random", concurrency=2)
    assert trained(bound(algorithm, FLAT), loss_of) != trained(bound(other, FLAT), loss_of)


@pytest.mark.parametrize("name", ["tpe", "qmc", "nsga2", "random"])
def test_each_sampler_searches_a_nested_space(name):
    configs = trained(bound(OptunaSearch(6, 1, name, concurrency=2), NESTED), lambda config: config["lr"])
    assert len({config["lr"] for config in configs}) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0, "epochs": 1}, "`n` must be an integer of at least 1, got 0"),
        ({"n": 1, "epochs": 0}, "`epochs` must be an integer of at least 1, got 0"),
        ({"n": 1, "epochs": 1, "concurrency": 0}, "`concurrency` must be an integer of at least 1, got 0"),
        (
            {"n": 1, "epochs": 1, "sampler": "tpa"},
            "`sampler` must be one of tpe, gp, cmaes, qmc, nsga2, random, or a function that makes one of a seed, "
            "got 'tpa'",
        ),
    ],
    ids=str,
)
def test_bad_settings(settings, message):
    with pytest.raises(AlgorithmError) as error:
        OptunaSearch(**settings)
    assert str(error.value) == message


def test_a_trial_without_a_best_epoch_failed_for_the_sampler(monkeypatch):
    search = OptunaSearch(1, epochs=1, sampler="random")
    of_best = EpochOrder((Objective("valid", "min"), Objective("loss", "min")))
    search.bind(Space(FLAT), metric="loss", mode="min", seed=5, of_best=of_best)
    search.next_groups(free=1)
    failed = []
    monkeypatch.setattr(search._projection, "mark_failed", failed.append)
    search.observe(Report(0, 1, {"loss": 0.1, "valid": math.nan}, state=TrialState.PAUSED))
    assert failed == [0]


@pytest.mark.parametrize(("of_best", "told"), [(EpochOrder(), 0.7), (EpochOrder((Objective("loss", "min"),)), 0.2)])
def test_the_sampler_gets_the_value_that_ranks(monkeypatch, of_best, told):
    search = OptunaSearch(1, epochs=3, sampler="random")
    search.bind(Space(FLAT), metric="loss", mode="min", seed=5, of_best=of_best)
    search.next_groups(free=1)
    values = []
    monkeypatch.setattr(search._projection, "add_values", lambda number, epoch, found: values.append(found))
    for epoch, loss, state in [(1, 0.5, "running"), (2, 0.2, "running"), (2, 0.2, "running"), (3, 0.7, "paused")]:
        search.observe(Report(0, epoch, {"loss": loss}, state=TrialState(state)))
    assert values == [(told,)]
