"""Sweeps of W&B as spaces; those of Optuna and Ray Tune are tested with their libraries."""

import math

import pytest

from shoal.core.distributions import LogNormal, Normal, QLogUniform
from shoal.core.domain import Constant
from shoal.core.errors import SpaceError
from shoal.core.space import Space, choice, loguniform, quniform, randint, uniform

PARAMETERS = [
    ("constant", {"value": 3}, 3),
    ("list", {"value": [1, 2]}, Constant([1, 2])),
    ("values", {"values": [64, 128]}, choice([64, 128])),
    ("lists", {"values": [[64], [128, 64]]}, choice([[64], [128, 64]])),
    ("weights", {"values": ["a", "b", "c"], "probabilities": [0.5, 0, 0.5]}, choice(["a", "c"], weights=[0.5, 0.5])),
    ("integers", {"min": 1, "max": 8}, randint(1, 9)),
    ("int_uniform", {"distribution": "int_uniform", "min": 1, "max": 8}, randint(1, 9)),
    ("floats", {"min": 0, "max": 1.0}, uniform(0, 1.0)),
    ("uniform", {"distribution": "uniform", "min": 0, "max": 1}, uniform(0, 1)),
    ("q_uniform", {"distribution": "q_uniform", "min": 0.3, "max": 2, "q": 0.5}, quniform(0.5, 2, 0.5)),
    ("q is 1", {"distribution": "q_uniform", "min": 0, "max": 9}, quniform(0.0, 9, 1)),
    ("log_uniform", {"distribution": "log_uniform", "min": -2, "max": 0}, loguniform(math.exp(-2), 1.0)),
    ("values of it", {"distribution": "log_uniform_values", "min": 1e-4, "max": 1}, loguniform(1e-4, 1)),
    ("text", {"distribution": "log_uniform_values", "min": "1e-4", "max": "1e-1"}, loguniform(1e-4, 1e-1)),
    ("inverse", {"distribution": "inv_log_uniform", "min": 0, "max": 2}, loguniform(math.exp(-2), 1.0)),
    (
        "q_log_uniform_values",
        {"distribution": "q_log_uniform_values", "min": 1, "max": 64, "q": 2},
        QLogUniform(2.0, 64, 2),
    ),
    (
        "q_log_uniform",
        {"distribution": "q_log_uniform", "min": 0, "max": 1, "q": 0.5},
        QLogUniform(1.0, math.e, 0.5),
    ),
    ("normal", {"distribution": "normal", "mu": 1, "sigma": 2}, Normal(1, 2)),
    ("standard", {"distribution": "normal"}, Normal(0.0, 1.0)),
    ("q_normal", {"distribution": "q_normal", "mu": 1, "sigma": 2, "q": 0.5}, Normal(1, 2, step=0.5)),
    ("log_normal", {"distribution": "log_normal", "mu": 0, "sigma": 1}, LogNormal(1.0, math.e)),
    ("q_log_normal", {"distribution": "q_log_normal", "mu": 0, "sigma": 1}, LogNormal(1.0, math.e, 1)),
    ("nested", {"parameters": {"lr": {"min": 0.0, "max": 1.0}, "n": {"value": 1}}}, {"lr": uniform(0.0, 1.0), "n": 1}),
]


@pytest.mark.parametrize(("name", "parameter", "own"), PARAMETERS, ids=[name for name, *_ in PARAMETERS])
def test_a_sweep_of_wandb_is_a_space(name, parameter, own):
    sweep = {"method": "bayes", "metric": {"name": "loss"}, "parameters": {name: parameter}}
    space = Space(sweep)
    assert space == Space({name: own})
    assert space.faults(space.sample(0)) == ()


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (
            {"distribution": "beta", "min": 0, "max": 1},
            "no counterpart of the distribution 'beta' of W&B; it has",
        ),
        ({"distribution": "uniform", "min": 0}, "the distribution 'uniform' of W&B needs `max`"),
        ({"min": 0}, "has a value, values, min and max, or a distribution"),
        ({"max": 1, "mim": 0}, "has the keys value, values, distribution, min, max, q, mu, sigma, probabilities"),
        ({"min": "a", "max": 1}, "`x`: `min` of a W&B sweep must be a finite number, got 'a'"),
        ({"distribution": "log_uniform", "min": 1, "max": 1000}, "takes exponents of e, .* write log_uniform_values"),
        ({"values": [1, 2], "probabilities": [1]}, "as many weights, not 1"),
        ({"values": []}, "at least one option"),
        ({"parameters": {"y": 3}}, "`x.y`: a parameter of a W&B sweep is a dict"),
    ],
)
def test_a_parameter_that_is_none_of_wandb_is_refused_by_name(parameter, words):
    with pytest.raises(SpaceError, match=words) as error:
        Space({"method": "grid", "parameters": {"x": parameter}})
    assert "`x" in str(error.value)


def test_a_sweep_with_a_bare_value_is_refused() -> None:
    with pytest.raises(SpaceError, match=r"`w`: a parameter of a W&B sweep is a dict, .* or {'value': 3}, got 3"):
        Space({"method": "random", "parameters": {"lr": {"min": 0.1, "max": 1.0}, "w": 3}})


def test_a_space_with_names_of_a_sweep_is_none():
    space = Space({"method": choice(["grid", "random"]), "parameters": {"lr": {"min": 1}}})
    assert space.sample(0)["parameters"] == {"lr": {"min": 1}}
    assert Space({"method": "grid", "parameters": {"lr": 3}}).sample(0)["method"] == "grid"
