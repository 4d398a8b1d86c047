"""`Space.sample` with some leaves given."""

import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.distributions import LogNormal, Normal
from shoal.core.errors import SpaceError
from shoal.core.reference import ref
from shoal.core.space import Space, choice, flatten, logrange, loguniform, qloguniform, quniform, randint, uniform

SPACE = Space(
    {
        "lr": loguniform(1e-4, 1e-1),
        "optimizer": choice(
            [{"name": "sgd", "momentum": uniform(0, 0.99)}, {"name": "adam", "beta": uniform(0.8, 0.999)}]
        ),
        "model": {"width": choice([64, 128]), "name": "mlp", "layers": choice([[64, 32], [128]])},
        "layers": randint(1, 5),
        "dropout": quniform(0, 0.5, 0.1),
        "decay": choice([0.0, loguniform(1e-6, 1e-2)]),
    }
)


@pytest.mark.parametrize(
    ("part", "leaves"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"lr": 0.01}, {"lr": 0.01}, id="float"),
        pytest.param({"lr": np.float32(0.5**4)}, {"lr": 0.0625}, id="numpy float"),
        pytest.param({"layers": np.int64(3)}, {"layers": 3}, id="numpy integer"),
        pytest.param({"dropout": 0}, {"dropout": 0.0}, id="integer of a float domain"),
        pytest.param({"dropout": 0.3}, {"dropout": 0.3}, id="on the step"),
        pytest.param({"model": {"width": 128}}, {"model.width": 128}, id="nested"),
        pytest.param({"model": {"name": "mlp"}}, {"model.name": "mlp"}, id="constant"),
        pytest.param({"model": {"layers": [64, 32]}}, {"model.layers": [64, 32]}, id="list"),
        pytest.param({"decay": 0.0}, {"decay": 0.0}, id="option"),
        pytest.param({"decay": 1e-3}, {"decay": 1e-3}, id="domain of an option"),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_given_leaves_have_their_values_and_all_others_keep_theirs(part, leaves, seed):
    expected = {**flatten(SPACE.sample(seed)), **leaves}
    found = flatten(SPACE.sample(seed, part))
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {name: type(x) for name, x in expected.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("part", "name", "own"),
    [
        pytest.param({"name": "sgd"}, "sgd", "momentum", id="sgd"),
        pytest.param({"name": "adam"}, "adam", "beta", id="adam"),
        pytest.param({"momentum": 0.5}, "sgd", "momentum", id="by its parameter"),
    ],
)
def test_a_given_value_decides_which_option_is_taken(part, name, own, seed):
    plain, found = SPACE.sample(seed), SPACE.sample(seed, {"optimizer": part})
    assert found["optimizer"].keys() == {"name", own}
    assert found["optimizer"]["name"] == name
    assert SPACE.faults(found) == ()
    assert {**found, "optimizer": plain["optimizer"]} == plain
    assert found == SPACE.sample(Random(seed), {"optimizer": part})


def test_the_sampled_option_is_kept_if_it_allows_the_given_value():
    space = Space({"a": choice([{"x": uniform(0, 1)}, {"x": uniform(0, 2), "y": 1}])})
    for seed in range(8):
        assert ("y" in space.sample(seed, {"a": {"x": 0.5}})["a"]) == ("y" in space.sample(seed)["a"])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        pytest.param({"width": 64}, ["`width`", "not in the space", "lr, optimizer, model"], id="unknown name"),
        pytest.param({"model": {"depth": 2}}, ["`model.depth`", "width, name, layers"], id="unknown nested name"),
        pytest.param({"model": 3}, ["`model`", "3", "dict of width"], id="value for a dict"),
        pytest.param({"lr": 1.0}, ["`lr`", "1.0", "loguniform(0.0001, 0.1)"], id="outside"),
        pytest.param({"lr": float("nan")}, ["`lr`", "nan"], id="NaN"),
        pytest.param({"lr": "0.01"}, ["`lr`", "'0.01'", "loguniform"], id="text"),
        pytest.param({"layers": 2.5}, ["`layers`", "2.5", "randint(1, 5)"], id="float of an integer domain"),
        pytest.param({"layers": True}, ["`layers`", "True", "randint(1, 5)"], id="bool"),
        pytest.param(
            {"dropout": 0.25}, ["`dropout`", "0.25", "quniform(0, 0.5, 0.1)", "0.2 and 0.3"], id="off the step"
        ),
        pytest.param({"dropout": 0.7}, ["`dropout`", "0.7", "nearest to it: 0.5"], id="beyond the last step"),
        pytest.param({"optimizer": {"name": "lion"}}, ["`optimizer`", "'lion'", "choice"], id="no such option"),
        pytest.param({"model": {"name": "cnn"}}, ["`model.name`", "'cnn'", "mlp"], id="another constant"),
        pytest.param([("lr", 0.01)], ["dict of lr"], id="no dict"),
    ],
)
def test_a_value_outside_the_space_is_refused_by_name(part, words):
    with pytest.raises(SpaceError) as error:
        SPACE.sample(0, part)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("domain", "value", "own"),
    [
        pytest.param(quniform(0, 1, 0.1), 0.1 + 0.2, 0.3, id="a sum"),
        pytest.param(quniform(-1, 1, 0.1), 0.3 - 0.1 * 3, 0.0, id="nearly 0"),
        pytest.param(qloguniform(0.1, 1, 0.1), 0.7 * 3 / 3 + 1e-16, 0.7, id="stepped on a logarithmic scale"),
        pytest.param(logrange(1e-4, 1e-1, 7), 10**-3.5, 0.000316227766017, id="more digits than recorded"),
        pytest.param(logrange(1, 8, 4), 4, 4.0, id="integer of floats"),
        pytest.param(Normal(0, 1, step=0.1), 0.1 + 0.2, 0.3, id="rounded normal"),
        pytest.param(LogNormal(1, 2, step=0.1), 0.1 + 0.2, 0.3, id="rounded lognormal"),
        pytest.param(quniform(0, 1e300, 1e299), 2.9999999999999e299, 3e299, id="large"),
    ],
)
def test_a_number_that_is_a_value_but_for_rounding_stands_for_it(domain, value, own):
    assert Space({"x": domain}).sample(0, {"x": value}) == {"x": own}
    assert type(Space({"x": domain}).sample(0, {"x": value})["x"]) is float


@pytest.mark.parametrize(
    ("domain", "value", "nearest"),
    [
        pytest.param(quniform(0, 1, 0.1), 0.3000001, "0.3 and 0.4", id="stepped"),
        pytest.param(logrange(1, 8, 4), 4.1, "4.0 and 8.0", id="the neighbours, and not 2.0"),
        pytest.param(logrange(1, 8, 4, integer=True), 5, "4 and 8", id="integers"),
        pytest.param(logrange(1, 8, 4, integer=True), 4.0, "2 and 4", id="a float is no integer"),
        pytest.param(logrange(1, 8, 4), 9, "8.0", id="above all"),
        pytest.param(qloguniform(0.1, 1, 0.1), 0.05, "0.1 and 0.2", id="below all"),
        pytest.param(LogNormal(1, 2, step=0.1), -0.04, "0.0 and 0.1", id="below 0"),
        pytest.param(quniform(0, 1e9, 1), 5e8 + 0.3, "500000000.0 and 500000001.0", id="among many steps"),
        pytest.param(quniform(0, 1e9, 1), 1e9 + 1, "1000000000.0", id="a step beyond many"),
        pytest.param(quniform(-1.7e308, 1.7e308, 1e308), 1.75e308, "1.3e+308", id="as large as floats are"),
    ],
)
def test_another_number_is_refused_with_the_nearest_values(domain, value, nearest):
    with pytest.raises(SpaceError, match=f"; nearest to it: {re.escape(nearest)}$"):
        Space({"x": domain}).sample(0, {"x": value})


@given(st.floats(0.001, 10), st.integers(1, 400), st.integers(0, 400), st.floats(-9e-12, 9e-12))
def test_any_value_of_steps_is_found_with_rounding(step, count, position, rounding):
    space = Space({"x": quniform(step, step * count, step)})
    values = [point["x"] for point in space.grid()]
    value = values[position % len(values)]
    assert space.sample(0, {"x": value * (1 + rounding)}) == {"x": value}


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_any_configuration_can_be_given_whole(seed, other):
    config = SPACE.sample(other)
    assert SPACE.sample(seed, config) == config


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (Space({"w": randint(1, 9), "d": uniform(0, ref("w"))}), {"d": 7.5}),
        (Space({"a": uniform(0, 1), "b": uniform(0, 1)}, ordered=[("a", "b")]), {"a": 0.9}),
        (Space({"a": randint(1, 9), "b": randint(1, 9)}, where=[ref("a") * ref("b") <= 16]), {"a": 8}),
    ],
    ids=["a computed bound", "an order", "a condition"],
)
def test_the_other_values_are_drawn_until_they_fit_the_given_ones(space: Space, given: dict[str, float]) -> None:
    for seed in range(20):
        config = space.sample(seed, given)
        assert given.items() <= config.items()
        assert space.faults(config) == ()
        assert config == space.sample(seed, given)


def test_a_value_that_nothing_else_allows_is_refused_with_what_to_do() -> None:
    space = Space({"lr": uniform(0, 1), "b": ref("lr") * 2})
    with pytest.raises(SpaceError, match=r"`b`.*if it depends on other values, give these, too"):
        space.sample(0, {"b": 0.1})
