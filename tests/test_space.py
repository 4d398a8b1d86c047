import hashlib
import json
import math
import subprocess
import sys
from enum import Enum
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from shoal.core.distributions import DOMAINS, LogNormal, LogRange, Normal, Ordinal, QLogUniform
from shoal.core.domain import Choice, Constant, Domain, LogRandInt, LogUniform, QUniform, RandInt, Uniform
from shoal.core.errors import SpaceError
from shoal.core.foreign_spaces import from_optuna
from shoal.core.space import Space, choice, flatten, grid, loguniform, quniform, randint, uniform

NESTED = {
    "lr": loguniform(1e-4, 1e-1),
    "width": choice([64, 128]),
    "data": {"batch_size": grid([32, 64]), "name": "digits", "crop": choice([(3, 4)])},
    "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 0.99)}, {"name": "adam"}]),
    "layers": randint(1, 5),
    "dropout": quniform(0, 0.5, 0.1),
    "decay": choice([0.0, loguniform(1e-6, 1e-2)]),
    "heads": IntDistribution(1, 64, log=True),
}


class Colour(str, Enum):  # noqa: UP042  (str() of a StrEnum is its value already)
    RED = "red"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        pytest.param({"a": {"b": choice([])}}, ["`a.b`", "at least one option", "choice([])"], id="empty choice"),
        pytest.param({"lr": loguniform(0, 0.1)}, ["`lr`", "above 0", "loguniform(0, 0.1)", "uniform"], id="log of 0"),
        pytest.param({"lr": loguniform(-1, 0.1)}, ["`lr`", "above 0", "loguniform(-1, 0.1)"], id="log of negative"),
        pytest.param(
            {"lr": uniform(2, 1)}, ["`lr`", "low must not be above high", "uniform(2, 1)"], id="uniform order"
        ),
        pytest.param({"lr": loguniform(2, 1)}, ["`lr`", "low must not be above high"], id="loguniform order"),
        pytest.param({"n": randint(3, 3)}, ["`n`", "excluded", "randint(3, 3)"], id="randint is empty"),
        pytest.param({"n": randint(0.5, 3)}, ["`n`", "integers", "0.5"], id="randint of a float"),
        pytest.param({"n": randint(False, 3)}, ["`n`", "integers", "False"], id="randint of a bool"),
        pytest.param({"n": RandInt(0, 3, 0)}, ["`n`", "step", "randint(0, 3, 0)"], id="step of 0"),
        pytest.param({"n": LogRandInt(0, 3)}, ["`n`", "above 0", "lograndint(0, 3)"], id="lograndint of 0"),
        pytest.param({"p": quniform(0, 1, 0)}, ["`p`", "q must be", "quniform(0, 1, 0)"], id="q of 0"),
        pytest.param({"p": quniform(0, 1, math.nan)}, ["`p`", "q must be", "nan"], id="q of NaN"),
        pytest.param({"p": quniform(1, 0, 0.1)}, ["`p`", "low must not be above high"], id="quniform order"),
        pytest.param({"p": uniform(0, math.inf)}, ["`p`", "finite", "inf"], id="infinite bound"),
        pytest.param({"p": uniform(math.nan, 1)}, ["`p`", "finite", "nan"], id="NaN bound"),
        pytest.param({"p": uniform(0, 10**400)}, ["`p`", "finite"], id="bound beyond the floats"),
        pytest.param({"p": loguniform("1e-4", 1)}, ["`p`", "int or float", "'1e-4'"], id="bound that is text"),
        pytest.param({"a": {3: 1}}, ["in `a`", "string", "3"], id="key that is not a string"),
        pytest.param({3: 1}, ["parameter's name must be a string", "3"], id="first key that is not a string"),
        pytest.param({"a.b": 1}, ["'a.b'", "dot", "nest"], id="key with a dot"),
        pytest.param({"": 1}, ["empty", "''"], id="empty key"),
        pytest.param({"a": {"b": {1, 2}}}, ["`a.b`", "a set", "no order", "choice([1, 2])"], id="set"),
        pytest.param({"w": (64, 128)}, ["`w`", "a tuple", "(64, 128)", "choice([64, 128])"], id="tuple"),
        pytest.param({"a": [(64,), (128,)]}, ["`a`", "write choice([(64,), (128,)])"], id="tuples in a list"),
        pytest.param({"a": {"b": [[64], [128]]}}, ["`a.b`", "write choice([[64], [128]])"], id="lists in a list"),
        pytest.param({"a": []}, ["`a`", "at least one option"], id="empty list"),
        pytest.param({"a": [1, {"b": [2, {3}]}]}, ["`a[1].b[1]`", "a set"], id="set in a list"),
        pytest.param({"a": choice([1, 10**5000])}, ["`a[1]`", "below 10^4000"], id="huge integer"),
        pytest.param({"w": range(3)}, ["`w`", "of type range", "Write choice(...) around it"], id="range"),
        pytest.param({"w": np.ones(2)}, ["`w`", "of type ndarray", "Write choice(...) around it"], id="numpy"),
        pytest.param({"w": torch.zeros(2)}, ["`w`", "JSON", "of type Tensor"], id="tensor"),
        pytest.param({"act": choice([torch.nn.ReLU])}, ["`act[0]`", "ReLU", "Give it a name"], id="class in a choice"),
        pytest.param({"a": choice([0, [2, object()]])}, ["`a[1][1]`", "of type object"], id="object in a list"),
        pytest.param(
            {"a": choice([[uniform(0, 1)]])}, ["`a[0][0]`", "a list", "uniform(0, 1)"], id="domain in an option"
        ),
        pytest.param({"a": math.inf}, ["`a`", "finite", "inf"], id="infinite constant"),
        pytest.param(
            {"o": choice([{"n": 1}, {"m": uniform(1, 0)}])}, ["`o[1].m`", "low must not"], id="inside an option"
        ),
        pytest.param([("a", 1)], ["dict of names"], id="not a dict"),
    ],
)
def test_a_bad_space_is_refused_by_path_and_value(parameters, words):
    with pytest.raises(SpaceError) as error:
        Space(parameters)
    for word in words:
        assert word in str(error.value)


def test_a_space_that_holds_itself_is_refused():
    parameters = {"a": 1}
    parameters["b"] = parameters
    with pytest.raises(SpaceError, match="a part of it holds itself"):
        Space(parameters)


@pytest.mark.parametrize("options", ["abc", {1, 2}, {"a": 1}, 3, b"ab"], ids=["str", "set", "dict", "int", "bytes"])
@pytest.mark.parametrize("function", [choice, grid])
def test_options_without_an_order_are_refused(function, options):
    with pytest.raises(SpaceError, match="takes a list of options"):
        function(options)


def test_a_sample_is_plain_nested_data_and_follows_its_seed():
    space = Space(NESTED)
    configs = [space.sample(seed) for seed in range(200)]
    assert configs == [space.sample(seed) for seed in range(200)]
    assert len({json.dumps(config) for config in configs}) == 200
    for config in configs:
        assert json.loads(json.dumps(config)) == config
        assert list(config) == list(NESTED)
        assert 1e-4 <= config["lr"] <= 1e-1
        assert config["data"]["name"] == "digits"
        assert config["data"]["crop"] == [3, 4]
        assert config["layers"] in (1, 2, 3, 4)
        assert config["dropout"] in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
        assert config["decay"] == 0.0 or 1e-6 <= config["decay"] <= 1e-2
        assert 1 <= config["heads"] <= 64


@pytest.mark.parametrize(
    ("given", "same"),
    [
        pytest.param({"w": [64, 128]}, {"w": choice([64, 128])}, id="numbers"),
        pytest.param({"w": [64]}, {"w": choice([64])}, id="one item"),
        pytest.param({"net": {"w": [64, 128]}}, {"net": {"w": choice([64, 128])}}, id="nested"),
        pytest.param({"w": ["a", None, True]}, {"w": choice(["a", None, True])}, id="no numbers"),
        pytest.param({"w": [0.0, randint(1, 3)]}, {"w": choice([0.0, randint(1, 3)])}, id="with a domain"),
        pytest.param(
            {"o": [{"name": "sgd", "m": [0.0, 0.9]}, {"name": "adam"}]},
            {"o": choice([{"name": "sgd", "m": choice([0.0, 0.9])}, {"name": "adam"}])},
            id="of dicts",
        ),
        pytest.param(
            {"o": choice([{"m": [1, 2]}, choice([3, 4])])},
            {"o": choice([{"m": choice([1, 2])}, choice([3, 4])])},
            id="within an option",
        ),
    ],
)
def test_a_list_is_a_choice(given, same):
    assert Space(given) == Space(same)
    assert Space(given).grid() == Space(same).grid()
    assert Space.from_json(Space(given).to_json()) == Space(same)


def test_a_list_that_is_an_option_of_a_choice_is_a_value():
    assert Space({"hidden": choice([[64, 32], [128]])}).grid() == [{"hidden": [64, 32]}, {"hidden": [128]}]
    assert Space({"hidden": choice([[64, 32]])}).sample(0) == {"hidden": [64, 32]}


def test_a_list_that_an_older_journal_keeps_as_a_value_stays_one():
    kept = '{"dict": {"hidden": {"value": [64, 32]}, "o": {"choice": [{"value": [1]}]}}}'
    assert Space.from_json(kept).grid() == [{"hidden": [64, 32], "o": [1]}]
    assert Space.from_json(kept).to_json() == kept


def test_the_axes_are_the_parameters_that_are_chosen_from_numbers():
    space = Space(
        {
            "size": choice([64, 16, 32]),
            "lr": loguniform(1e-4, 1.0),
            "kind": choice(["a", "b"]),
            "biased": choice([True, False]),
            "mixed": choice([1, "two"]),
            "inner": {"rate": choice([0.5, 0.1])},
        }
    )
    assert space.axes() == {"size": (16, 32, 64), "inner.rate": (0.1, 0.5)}


def test_an_option_is_sampled_only_when_chosen():
    configs = [Space(NESTED).sample(seed)["optimizer"] for seed in range(200)]
    assert {(config["name"], "momentum" in config) for config in configs} == {("sgd", True), ("adam", False)}


def test_a_sample_goes_on_with_a_given_generator():
    space, rng, expected = Space({"x": uniform(0, 1)}), Random(3), Random(3)
    assert [space.sample(rng), space.sample(rng)] == [{"x": expected.random()}, {"x": expected.random()}]


def test_changing_a_config_or_the_dict_given_leaves_the_space_alone():
    given = {"a": {"b": 1}, "c": choice([[1, {"d": 2}]])}
    space = Space(given)
    given["a"]["b"] = 5
    for config in (space.sample(0), *space.grid()):
        config["c"][1]["d"] = 7
        config["a"]["b"] = 7
    assert space.sample(0) == {"a": {"b": 1}, "c": [1, {"d": 2}]} == space.grid()[0]


@pytest.mark.parametrize(
    ("given_value", "plain"),
    [
        pytest.param(np.int64(3), 3, id="numpy int"),
        pytest.param(np.float32(0.5), 0.5, id="numpy float"),
        pytest.param(Fraction(1, 4), 0.25, id="fraction"),
        pytest.param(Colour.RED, "red", id="string enum"),
        pytest.param(True, True, id="bool"),
        pytest.param(None, None, id="None"),
        pytest.param(choice([(1, (2,))]), [1, [2]], id="tuple"),
    ],
)
def test_constants_become_plain(given_value, plain):
    value = Space({"x": given_value}).sample(0)["x"]
    assert value == plain
    assert type(value) is type(plain)


def test_numpy_options_and_bounds_give_plain_values():
    config = Space({"a": choice(np.logspace(-3, 0, 4)), "b": uniform(np.float64(0), np.float64(1))}).sample(0)
    assert [type(value) for value in config.values()] == [float, float]


@pytest.mark.parametrize(
    ("parameters", "points"),
    [
        pytest.param({}, [{}], id="empty"),
        pytest.param({"a": 1}, [{"a": 1}], id="constant"),
        pytest.param(
            {"a": choice([1, 2]), "b": {"c": grid(["x", "y"])}},
            [{"a": a, "b": {"c": c}} for a in (1, 2) for c in "xy"],
            id="product, the last fastest",
        ),
        pytest.param({"n": randint(1, 4)}, [{"n": 1}, {"n": 2}, {"n": 3}], id="randint excludes high"),
        pytest.param({"n": RandInt(0, 10, 4)}, [{"n": 0}, {"n": 4}, {"n": 8}], id="step"),
        pytest.param({"n": LogRandInt(1, 3)}, [{"n": 1}, {"n": 2}], id="lograndint"),
        pytest.param({"p": quniform(0.1, 0.4, 0.1)}, [{"p": p} for p in (0.1, 0.2, 0.3, 0.4)], id="exact decimals"),
        pytest.param({"p": quniform(0, 1, 0.3)}, [{"p": p} for p in (0.0, 0.3, 0.6, 0.9)], id="high between points"),
        pytest.param(
            {"o": choice([{"n": "sgd", "m": choice([0, 1])}, {"n": "adam"}])},
            [{"o": {"n": "sgd", "m": 0}}, {"o": {"n": "sgd", "m": 1}}, {"o": {"n": "adam"}}],
            id="conditional",
        ),
        pytest.param({"x": choice([0, randint(5, 7)])}, [{"x": 0}, {"x": 5}, {"x": 6}], id="domain as an option"),
    ],
)
def test_grid(parameters, points):
    assert Space(parameters).grid() == points


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        pytest.param({"a": {"lr": uniform(0, 1)}}, "`a.lr`: uniform(0, 1)", id="uniform"),
        pytest.param({"o": choice([1, {"lr": loguniform(1, 2)}])}, "`o[1].lr`: loguniform(1, 2)", id="in an option"),
    ],
)
def test_a_continuum_in_a_grid_is_refused_with_the_remedy(parameters, path):
    with pytest.raises(SpaceError) as error:
        Space(parameters).grid()
    assert path in str(error.value)
    assert "grid([...])" in str(error.value)


@pytest.mark.parametrize(
    ("parameters", "leaves"),
    [
        pytest.param({}, {}, id="empty"),
        pytest.param(
            {"a": 1, "b": {"c": Constant([1, 2])}},
            {"a": ([1], False, ""), "b.c": ([[1, 2]], False, "")},
            id="constants",
        ),
        pytest.param({"x": {"y": uniform(0, 1)}}, {"x.y": ([Uniform(0, 1)], False, "x.y")}, id="domain"),
        pytest.param({"w": choice([64, 128])}, {"w": ([64, 128], False, "w")}, id="choice"),
        pytest.param(
            {"o": choice([{"n": "sgd", "m": uniform(0, 1)}, {"n": "adam"}])},
            {"o.n": (["sgd", "adam"], False, "o"), "o.m": ([Uniform(0, 1)], True, "o.m")},
            id="conditional",
        ),
        pytest.param(
            {"d": choice([0, uniform(0, 1)])}, {"d": ([0, Uniform(0, 1)], False, "d")}, id="domain as an option"
        ),
        pytest.param({"o": choice([{}, {"n": 1}])}, {"o.n": ([1], True, "o")}, id="an option of nothing"),
        pytest.param(
            {"o": choice([choice([{"n": 1}, {}]), {"n": uniform(0, 1)}])},
            {"o.n": ([1, Uniform(0, 1)], True, "o.n")},
            id="a choice in a choice",
        ),
    ],
)
def test_leaves(parameters, leaves):
    found = {
        name: ([*leaf.values], leaf.optional, leaf.choice_name) for name, leaf in Space(parameters).leaves().items()
    }
    assert found == leaves


@given(st.integers(0, 1000))
def test_every_value_of_a_configuration_is_of_a_leaf(seed):
    space = Space(NESTED)
    leaves = space.leaves()
    config = flatten(space.sample(seed))
    assert {name for name, leaf in leaves.items() if not leaf.optional} <= config.keys() <= leaves.keys()
    for name, value in config.items():
        parts = leaves[name].values
        assert any(part.contains(value) if isinstance(part, Domain) else part == value for part in parts)


def test_every_parameter_with_its_domain_and_whether_every_config_has_it():
    space = Space(
        {
            "lr": uniform(0, 1),
            "size": 3,
            "data": {"crop": randint(1, 9)},
            "net": choice([{"width": choice([1, 2])}, uniform(0, 2), "none"]),
        }
    )
    assert space.domains() == {
        "lr": (Uniform(0, 1), False),
        "data.crop": (RandInt(1, 9), False),
        "net": (Choice(({"width": Choice((1, 2))}, Uniform(0, 2), "none")), False),
        "net[0].width": (Choice((1, 2)), True),
        "net[1]": (Uniform(0, 2), True),
    }


def test_flatten():
    config = {"lr": 1, "optimizer": {"name": "sgd", "more": {"m": [1, 2]}}}
    assert flatten(config) == {"lr": 1, "optimizer.name": "sgd", "optimizer.more.m": [1, 2]}


def test_json_round_trip_keeps_the_space_and_its_samples():
    space = Space(NESTED)
    copy = Space.from_json(space.to_json())
    assert copy == space
    assert hash(copy) == hash(space)
    assert [copy.sample(seed) for seed in range(20)] == [space.sample(seed) for seed in range(20)]
    assert Space({"a": 1}) != Space({"a": 2})
    assert Space({"a": 1}) != {"a": 1}


def test_a_space_without_rules_samples_what_it_always_did():
    space = Space(NESTED)
    text = space.to_json() + "".join(json.dumps(space.sample(seed)) for seed in range(200))
    assert hashlib.sha256(text.encode()).hexdigest().startswith("583fc39812032791")


def test_json_of_an_unknown_domain_is_refused():
    with pytest.raises(SpaceError, match="has no domain 'gaussian'"):
        Space.from_json('{"dict": {"x": {"gaussian": [0, 1]}}}')


def test_json_keeps_constants_that_look_like_domains_apart():
    space = Space({"uniform": {"value": 3}, "choice": choice([[1, 2]])})
    assert Space.from_json(space.to_json()).sample(0) == {"uniform": {"value": 3}, "choice": [1, 2]}


WITHOUT_EQUALS = {Normal, LogNormal, QLogUniform, LogRange, Ordinal}
CONVERSIONS = [
    (FloatDistribution(0, 1), Uniform(0.0, 1.0)),
    (FloatDistribution(1e-3, 1, log=True), LogUniform(1e-3, 1.0)),
    (FloatDistribution(0, 1, step=0.25), QUniform(0.0, 1.0, 0.25)),
    (IntDistribution(1, 9), RandInt(1, 10)),
    (IntDistribution(1, 9, step=2), RandInt(1, 10, 2)),
    (IntDistribution(1, 9, log=True), LogRandInt(1, 10)),
    (CategoricalDistribution(["a", None, 2]), Choice(("a", None, 2))),
]


@pytest.mark.parametrize(("distribution", "domain"), CONVERSIONS, ids=[str(domain) for _, domain in CONVERSIONS])
def test_optuna_and_back(distribution, domain):
    assert from_optuna(distribution) == domain
    assert domain.to_optuna() == distribution
    assert Space({"x": distribution}) == Space({"x": domain})


def test_every_domain_is_converted_above():
    assert {type(domain) for _, domain in CONVERSIONS} == set(DOMAINS.values()) - WITHOUT_EQUALS


def test_to_optuna_ends_a_stepped_range_at_its_last_point():
    assert quniform(0, 1, 0.3).to_optuna() == FloatDistribution(0, 0.9, step=0.3)


def test_to_optuna_numbers_options_that_optuna_cannot_hold():
    assert choice([{"name": "sgd"}, {"name": "adam"}, 3]).to_optuna() == CategoricalDistribution((0, 1, 2))


def test_from_optuna_leaves_all_else_alone():
    assert from_optuna({"low": 0}) is None


def test_importing_the_space_imports_neither_torch_nor_optuna_nor_numpy():
    code = "import sys, shoal.core.space; print(sorted({'torch', 'optuna', 'numpy', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=sys.float_info.min, allow_nan=False, allow_infinity=False)


@given(st.tuples(finite, finite).map(sorted), st.integers(0, 2**64))
def test_uniform_stays_within_any_bounds(bounds, seed):
    low, high = bounds
    assert low <= Space({"x": uniform(low, high)}).sample(seed)["x"] <= high


@given(st.tuples(positive, positive).map(sorted), st.integers(0, 2**64))
def test_loguniform_stays_within_any_bounds(bounds, seed):
    low, high = bounds
    assert low <= Space({"x": loguniform(low, high)}).sample(seed)["x"] <= high


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**30), st.integers(0, 2**64))
def test_randint_stays_below_high(low, width, seed):
    assert low <= Space({"x": randint(low, low + width)}).sample(seed)["x"] < low + width


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 2**64))
def test_lograndint_stays_below_high(low, width, seed):
    assert low <= Space({"x": LogRandInt(low, low + width)}).sample(seed)["x"] < low + width


@given(
    low=st.decimals(-100, 100, places=3),
    steps=st.integers(0, 50),
    q=st.decimals("0.001", 10, places=3),
    seed=st.integers(0, 2**64),
)
def test_a_quniform_has_the_points_of_decimal_arithmetic(low, steps, q, seed):
    space = Space({"x": quniform(float(low), float(low + steps * q), float(q))})
    points = [point["x"] for point in space.grid()]
    assert points == [float(low + k * q) for k in range(steps + 1)]
    assert space.sample(seed)["x"] in points


constants = st.none() | st.booleans() | st.integers() | finite | st.text()
names = st.text(st.characters(exclude_characters="."), min_size=1)
discrete = st.recursive(
    constants
    | st.lists(constants, max_size=3).map(Constant)
    | st.builds(lambda low: randint(low, low + 2), st.integers()),
    lambda nodes: (
        st.dictionaries(names, nodes, max_size=2) | st.lists(nodes, min_size=1, max_size=2).map(choice)  # branches
    ),
    max_leaves=6,
)


@given(st.dictionaries(names, discrete, max_size=3), st.integers(0, 2**64))
def test_every_sample_of_a_discrete_space_is_a_point_of_its_grid_and_survives_json(parameters, seed):
    space = Space(parameters)
    copy = Space.from_json(space.to_json())
    assert copy.sample(seed) == space.sample(seed)
    assert space.sample(seed) in space.grid()


@given(st.integers(0, 1000))
def test_parameters_are_what_a_configuration_was_drawn_by(seed):
    space = Space({**NESTED, "n": randint(3, 9), "q": quniform(0.1, 1, 0.3), "r": LogRandInt(1, 50), "c": "fixed"})
    config = space.sample(seed)
    parameters = space.parameters(config)
    assert space.draw(lambda path, domain: parameters[path][1]) == config


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"a": 2.0, "b": 1},
        {"a": 0.5, "b": 2},
        {"a": 0.5, "b": True},
        {"a": "0.5", "b": 1},
        {"a": 0.5, "b": 1, "c": 1},
    ],
    ids=str,
)
def test_what_is_not_a_configuration_has_no_parameters(config):
    with pytest.raises(SpaceError, match="is not a configuration of Space"):
        Space({"a": uniform(0, 1), "b": 1}).parameters(config)


def test_a_whole_number_stands_for_the_equal_float():
    """As JavaScript writes it; nothing else changes its type."""
    space = Space({"f": choice([1.0, 2.5])})
    assert space.parameters({"f": 1}) == space.parameters({"f": 1.0})
    with pytest.raises(SpaceError):
        Space({"n": choice([1, 2])}).parameters({"n": 1.0})


PLACES = {
    Uniform(-2, 6): {0.0: -2.0, 0.25: 0.0, 1.0: 6.0},
    Uniform(3, 3): {0.5: 3.0},
    Uniform(-1.7e308, 1.7e308): {0.5: 0.0, 1.0: 1.7e308},
    LogUniform(1e-4, 1): {0.0: 1e-4, 0.5: 1e-2, 1.0: 1.0},
    QUniform(0.1, 0.9, 0.2): {0.1: 0.1, 0.3: 0.3, 0.9: 0.9},
    RandInt(2, 10, 2): {0.125: 2, 0.375: 4, 0.875: 8},
    RandInt(7, 8): {0.5: 7},
    LogRandInt(1, 4): {math.log(2) / 4 / math.log(2): 1, math.log(12) / 2 / math.log(4): 3},
    Choice(("a", "b", "c", "d")): {0.125: 0, 0.875: 3},
    Choice(("a", "b", "c"), (1, 2, 1)): {0.125: 0, 0.5: 1, 0.875: 2},
    Normal(1, 2): {0.5: 1.0, 0.8413447460685429: 3.0, 0.15865525393145707: -1.0},
    Normal(0, 1, -1, 1): {0.0: -1.0, 0.5: 0.0, 1.0: 1.0},
    LogNormal(1e-3, 10): {0.5: 1e-3, 0.8413447460685429: 1e-2},
    QLogUniform(1, 4, 1): {math.log(1.5) / math.log(4) / 2: 1.0, (1 + math.log(3.5) / math.log(4)) / 2: 4.0},
    LogRange(1, 8, 4): {0.125: 1.0, 0.375: 2.0, 0.625: 4.0, 0.875: 8.0},
    Ordinal((1, 10, 4)): {0.5 / 3: 1, 0.5: 10, 2.5 / 3: 4},
}


@pytest.mark.parametrize("domain", PLACES, ids=str)
def test_places_of_values(domain):
    for place, value in PLACES[domain].items():
        assert domain.value_at(place) == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert domain.quantile_of(value) == pytest.approx(place)
    assert domain.value_at(1.0) == pytest.approx(domain.value_at(1 - 1e-16)), "the end belongs to the last value"


@pytest.mark.parametrize("domain", PLACES, ids=str)
def test_a_value_is_at_its_place_and_places_are_as_likely_as_samples(domain):
    rng = Random(0)
    sampled = [domain.sample(rng) for _ in range(2000)]
    for value in sampled[:200]:
        assert domain.value_at(domain.quantile_of(value)) == pytest.approx(value)
    placed = sorted(domain.value_at((i + 0.5) / 2000) for i in range(2000))
    ends = domain.quantile_of(placed[0]), domain.quantile_of(placed[-1])
    assert 0 <= ends[0] <= ends[1] <= 1
    mean = [sum(map(domain.quantile_of, values)) / 2000 for values in (sampled, placed)]
    assert mean[0] == pytest.approx(mean[1], abs=0.03)


VAST = {
    "more than an index": (randint(0, 10**30), 5 * 10**29),
    "more than a float": (randint(-(10**400), 10**400), 0),
    "with a step": (RandInt(0, 10**30, 10), 5 * 10**29),
    "sys.maxsize": (randint(0, sys.maxsize + 1), (sys.maxsize + 1) // 2),
    "logarithms": (LogRandInt(1, 10**30), 10**15),
    "logarithms of more than a float": (LogRandInt(1, 10**400), 10**200),
}


@pytest.mark.parametrize(("domain", "middle"), VAST.values(), ids=VAST)
def test_places_among_very_many_integers(domain, middle):
    for place, value in ((0.0, domain.low), (0.5, middle), (1.0, domain.high - getattr(domain, "step", 1))):
        assert abs(domain.value_at(place) - value) * 10**9 <= abs(value), (
            place
        )  # in whole numbers, for there are no floats
    assert domain.contains(domain.value_at(1 / 3))
    assert domain.contains(domain.sample(Random(0)))
    for place in (0.25, 0.5, 0.75):
        assert domain.quantile_of(domain.value_at(place)) == pytest.approx(place)


def test_to_optuna_has_no_step_where_there_are_very_many():
    domain = quniform(0.0, 1000.0, 1e-7)
    distribution = domain.to_optuna()
    assert distribution == FloatDistribution(0, 1000)
    assert quniform(0, 1, 1e-6 / 2).to_optuna().step is None
    assert quniform(0, 0.999999, 1e-6).to_optuna().step == 1e-6
    assert all(distribution._contains(domain.sample(Random(seed))) for seed in range(1000))


@pytest.mark.parametrize(
    ("options", "plain", "positions"),
    [
        ([1, True], False, [0, 1]),
        ([1.0, 1], False, [0, 1]),
        ([0, "a", False], False, [0, 1, 2]),
        ([1, 1], True, [0, 0]),
        ([1, "1", None, 2.0, False], True, [0, 1, 2, 3, 4]),
        ([[1]], False, [0]),
    ],
    ids=str,
)
def test_options_that_optuna_can_tell_apart(options, plain, positions):
    domain = choice(options)
    assert domain.is_plain is plain
    shown = [domain.optuna_value(position) for position in range(len(options))]
    assert [domain.from_optuna_value(each) for each in shown] == positions
    assert domain.to_optuna() == CategoricalDistribution(options if plain else range(len(options)))


@pytest.mark.parametrize(
    ("parameters", "count"),
    [
        pytest.param({"n": randint(0, 10**6 + 1)}, 10**6 + 1, id="one"),
        pytest.param({"n": randint(0, 10**30), "w": choice([1, 2])}, 2 * 10**30, id="product"),
        pytest.param({"p": quniform(0, 1000, 1e-5), "a": {"b": LogRandInt(1, 11)}}, (10**8 + 1) * 10, id="nested"),
        pytest.param(
            {"o": choice([{"n": RandInt(0, 10**7, 10), "m": choice(["a", "b"])}, "none"])}, 2 * 10**6 + 1, id="sum"
        ),
    ],
)
def test_too_many_points_are_refused_before_they_are_made(parameters, count):
    with pytest.raises(SpaceError) as error:
        Space(parameters).grid()
    assert str(error.value) == (
        f"the space has {count} configurations, and at most 1000000 are tried one by one; choose the algorithm Random, "
        "or coarser domains"
    )


def test_a_continuum_is_named_however_many_points_there_are():
    with pytest.raises(SpaceError, match=r"`lr`: uniform.* has infinitely many values"):
        Space({"n": randint(0, 10**9), "lr": uniform(0, 1)}).grid()


@pytest.mark.parametrize("domain", [*PLACES, RandInt(0, 10, 4), RandInt(0, 9, 3), quniform(0, 1, 0.3)], ids=str)
def test_there_are_as_many_points_as_are_counted(domain):
    points = domain.points()
    assert domain.count() == (None if points is None else len([*points]))


def test_domains_and_columns_are_those_of_all_options():
    space = Space(
        {
            "lr": loguniform(1e-4, 1),
            "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 1)}, {"name": "adam"}, randint(1, 3)]),
            "constant": {"a": 3},
        }
    )
    assert list(space.domains()) == ["lr", "optimizer", "optimizer[0].momentum", "optimizer[2]"]
    assert space.domains()["optimizer[0].momentum"] == (uniform(0, 1), True)
    assert space.leaves().keys() == {"lr", "optimizer", "optimizer.name", "optimizer.momentum", "constant.a"}
    for seed in range(50):
        config = space.sample(seed)
        assert space.parameters(config).keys() <= space.domains().keys()
        assert flatten(config).keys() <= space.leaves().keys()
