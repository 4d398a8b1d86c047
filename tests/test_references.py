"""Computed values, computed bounds, orders and conditions of a space."""

import json
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.core.domain import Uniform
from shoal.core.errors import SpaceError
from shoal.core.reference import Expression, evaluate, parse, ref
from shoal.core.space import Space, choice, flatten, loguniform, normal, ordinal, randint, uniform

a, b = ref("a"), ref("b")

EXPRESSIONS = {
    "a + 2": (a + 2, 9), "2 - a": (2 - a, -5), "a * b": (a * b, 21), "1 / a": (1 / a, 1 / 7), "a // b": (a // b, 2),
    "a % 4": (a % 4, 3), "-a": (-a, -7), "min(a, b, 1)": (a.min(b, 1), 1), "max(a, 10)": (a.max(10), 10),
    "round(a / b)": (round(a / b), 2), "round(a / b, 1)": (round(a / b, 1), 2.3), "(a + b) * 2": ((a + b) * 2, 20),
    "a < b": (a < b, False), "a >= 7": (a >= 7, True), "a == 7": (a == 7, True), "a != b": (a != b, True),
    "(a < b) | (b < 4)": ((a < b) | (b < 4), True), "(a > 0) & (b > 3)": ((a > 0) & (b > 3), False),
    "~(a < b)": (~(a < b), True), "c.d == 'x'": (ref("c.d") == "x", True), "10 // a": (10 // a, 1),
    "10 % a": (10 % a, 3), "a - (b - 1)": (a - (b - 1), 5), "2 * a <= b + 1": (2 * a <= b + 1, False),
}  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_arithmetic_is_data_that_is_computed_and_can_be_written_as_text(text):
    expression, expected = EXPRESSIONS[text]
    values = {"a": 7, "b": 3, "c.d": "x"}
    assert evaluate(expression, values.__getitem__, "x") == expected
    assert str(expression) == text
    assert parse(text.replace("~", "not ")).data == expression.data
    assert json.loads(json.dumps(expression.data)) == expression.data


def test_text_has_chains_and_words_as_in_python():
    assert str(parse("0 < a < b + 1")) == "(0 < a) & (a < b + 1)"
    assert str(parse("a < 1 and not b < 2 or a == 'x'")) == "(a < 1) & ~(b < 2) | (a == 'x')"


@pytest.mark.parametrize(
    "text",
    ["a +", "__import__('os')", "a.b()", "[a]", "a if b else 1", "lambda: 1", "a ** b", "f'{a}'", "a[0]", "1e5000j",
     "min(a, key=b)", "(" * 5000, "a" * 20_000, ""],
)  # fmt: skip
def test_other_text_is_refused(text):
    with pytest.raises(SpaceError, match="is no arithmetic with names of parameters"):
        parse(text)


SPACE = Space(
    {
        "epochs": randint(10, 100),
        "warmup": ref("epochs") // 10,
        "low": uniform(0, 1),
        "high": uniform(0, 1),
        "layers": randint(1, 5),
        "width": randint(8, 8 * ref("layers") + 1),
        "net": {"heads": choice([1, 2, 4]), "dim": ref("net.heads") * 16},
        "optimizer": choice(
            [
                {"name": "sgd", "lr": loguniform(1e-3, 1), "damp": uniform(0, ref("optimizer.lr"))},
                {"name": "adam", "decay": choice([0.0, uniform(0, ref("low"))])},
            ]
        ),
        "scale": ref("warmup") / 2,
    },
    where=[ref("layers") * ref("width") <= 64, (ref("optimizer.name") != "sgd") | (ref("net.heads") > 1)],
    ordered=[("low", "high")],
)


@given(st.integers(0, 2**63 - 1))
def test_every_sample_meets_all_rules(seed):
    config = SPACE.sample(seed)
    assert SPACE.faults(config) == ()
    assert config["warmup"] == config["epochs"] // 10
    assert config["scale"] == config["warmup"] / 2
    assert config["net"]["dim"] == 16 * config["net"]["heads"]
    assert config["low"] <= config["high"]
    assert 8 <= config["width"] <= 8 * config["layers"]
    assert config["layers"] * config["width"] <= 64
    assert config["optimizer"]["name"] == "adam" or config["net"]["heads"] > 1
    if config["optimizer"]["name"] == "sgd":
        assert 0 <= config["optimizer"]["damp"] <= config["optimizer"]["lr"]
    else:
        assert 0 <= config["optimizer"]["decay"] <= config["low"]


@given(st.integers(0, 2**63 - 1))
def test_json_keeps_rules_and_references(seed):
    copy = Space.from_json(SPACE.to_json())
    assert copy == SPACE
    assert copy.sample(seed) == SPACE.sample(seed)
    assert copy.to_json() == SPACE.to_json()


@given(st.integers(0, 2**63 - 1))
def test_picks_of_a_configuration_make_it_again(seed):
    config = SPACE.sample(seed)
    picks = SPACE.parameters(json.loads(json.dumps(config)))
    assert {path for path, (domain, _) in picks.items() if domain == Uniform(0.0, 1.0)} >= {"width"}
    again = SPACE.draw(lambda path, domain: picks[path][1])
    assert flatten(again).keys() == flatten(config).keys()
    for name, value in flatten(config).items():
        assert flatten(again)[name] == (pytest.approx(value) if isinstance(value, float) else value)


def test_a_domain_with_computed_bounds_is_a_quantile_to_samplers():
    assert SPACE.domains()["width"] == (Uniform(0.0, 1.0), False)
    assert SPACE.domains()["optimizer[0].damp"] == (Uniform(0.0, 1.0), True)
    assert "warmup" not in SPACE.domains()


def test_ordered_values_are_uniform_on_the_ordered_pairs():
    space = Space({"a": uniform(0, 1), "b": uniform(0, 1)}, ordered=[("a", "b")])
    pairs = [space.sample(seed) for seed in range(1000)]
    assert all(pair["a"] <= pair["b"] for pair in pairs)
    assert sum(pair["b"] < 0.5 for pair in pairs) / 1000 == pytest.approx(0.25, abs=0.04)
    assert sum(pair["a"] < 0.5 < pair["b"] for pair in pairs) / 1000 == pytest.approx(0.5, abs=0.04)


def test_an_ordinal_is_ordered_by_its_positions():
    size = ordinal(["small", "medium", "large"])
    space = Space({"a": size, "b": size}, ordered=[("a", "b")])
    found = {(config["a"], config["b"]) for config in map(space.sample, range(100))}
    assert found == {(x, y) for i, x in enumerate(size.values) for y in size.values[i:]}
    assert space.faults({"a": "large", "b": "small"}) == ("`a <= b` does not hold for a = 'large', b = 'small'",)


@pytest.mark.parametrize(
    ("parameters", "rules", "words"),
    [
        pytest.param({"a": b, "b": a}, {}, "`a` depends on itself: a -> b -> a", id="circle"),
        pytest.param({"a": a + 1}, {}, "`a` depends on itself: a -> a", id="itself"),
        pytest.param({"a": b, "b": uniform(0, ref("c")), "c": a}, {}, "a -> b -> c -> a", id="circle by a bound"),
        pytest.param(
            {"a": ref("lrr"), "lr": 1},
            {},
            "`a` refers to 'lrr', which is no parameter; did you mean 'lr'?",
            id="unknown",
        ),
        pytest.param(
            {"a": ref("o.x"), "o": choice([{"x": 1}, {"y": 2}])},
            {},
            "which only some configurations have",
            id="optional",
        ),
        pytest.param({"a": 1}, {"where": [ref("c") < 1]}, "`where: c < 1` refers to 'c'", id="unknown in a condition"),
        pytest.param({"a": 1}, {"where": a < 2}, "`where` must be a list of conditions", id="no list"),
        pytest.param({"a": 1}, {"where": [True]}, "a condition of `where` compares refs", id="no expression"),
        pytest.param({"a": 1}, {"where": [a + 1]}, "a condition of `where` is true or false", id="no condition"),
        pytest.param(
            {"a": 1, "b": uniform(0, 1)}, {"ordered": ["a", "b"]}, "`ordered` must be a list of groups", id="one group"
        ),
        pytest.param({"a": 1, "b": uniform(0, 1)}, {"ordered": [("a", "b")]}, "got 'a' of ('a', 'b')", id="constant"),
        pytest.param(
            {"a": uniform(0, 1), "b": uniform(0, 2)}, {"ordered": [("a", "b")]}, "the same domain", id="other domain"
        ),
        pytest.param({"a": uniform(0, 1)}, {"ordered": [("a", "a")]}, "two or more parameters", id="twice"),
        pytest.param({"a": Expression(["**", 1, 2])}, {}, "there is no operation '**'", id="operation"),
        pytest.param({"a": Expression(["+", 1])}, {}, "'+' takes 2 to 2 operands, got 1", id="operands"),
        pytest.param({"a": Expression([["ref"], 1])}, {}, "begins with an operation", id="list of lists"),
        pytest.param({"a": Expression(["ref", 3])}, {}, "has the name of one parameter", id="name"),
        pytest.param({"a": 1 + Expression({"x": 1})}, {}, "consists of numbers, text and lists", id="dict"),
        pytest.param({"a": 1, "b": choice([[a, 2]])}, {}, "`b[0][0]`: an option that is a list", id="in a list"),
    ],
)
def test_rules_that_cannot_be_are_refused_when_the_space_is_made(parameters, rules, words):
    with pytest.raises(SpaceError) as error:
        Space(parameters, **rules)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        pytest.param(
            {"a": 0, "b": 1 / a}, "`b`: 1 / a has no value for a = 0 (division by zero)", id="division by zero"
        ),
        pytest.param({"a": "x", "b": a * 2}, "needs numbers", id="text"),
        pytest.param({"a": 1e308, "b": a * 10}, "has no value for a = 1e+308", id="infinite"),
        pytest.param(
            {"a": 0, "b": uniform(1, a)},
            "`b`: low must not be above high, got uniform(1, 0), which is uniform(1, a) there",
            id="no values",
        ),
        pytest.param({"a": 1.5, "b": randint(0, a)}, "low and high must be integers", id="bound of an integer"),
        pytest.param({"a": 10**3900, "b": a * a}, "an integer must be below 10^4000", id="digits"),
        pytest.param({"a": 5, "b": round(a, -(10**9))}, "round takes a whole number of digits", id="digits of round"),
    ],
)
def test_what_cannot_be_computed_names_parameter_and_values(parameters, words):
    with pytest.raises(SpaceError) as error:
        Space(parameters).sample(0)
    assert words in str(error.value)


def test_expressions_are_limited_in_depth_and_size():
    deep = a
    for _ in range(5000):
        deep = -deep
    wide = a.min(*[a.min(*[a] * 100)] * 20)
    start = time.process_time()
    for expression in (deep, wide):
        with pytest.raises(SpaceError, match="at most 1000 parts, and operations 32 deep"):
            Space({"a": 1, "b": expression})
    assert time.process_time() - start < 5


def test_a_reference_has_no_value_before_a_draw():
    with pytest.raises(SpaceError, match=r"write a.min\(b\)"):
        min(a, 3)
    with pytest.raises(SpaceError, match="no function can take it"):
        float(a)
    with pytest.raises(SpaceError, match="ref takes the name of a parameter, got 3"):
        ref(3)


def test_conditions_that_refuse_everything_end_with_what_they_refused():
    space = Space({"a": uniform(0, 1), "b": uniform(0, 1)}, where=[a > 2, b < 1])
    with pytest.raises(SpaceError, match=r"none of 1000 random .* \(less than 0.1 %\): `a > 2` refused 1000"):
        space.sample(0)


def test_conditions_change_only_the_samples_that_they_refuse():
    free = {"a": uniform(0, 1), "b": uniform(0, 1)}
    bound = Space(free, where=[a + b <= 1])
    pairs = [(Space(free).sample(seed), bound.sample(seed)) for seed in range(200)]
    kept = [own == plain for plain, own in pairs]
    assert kept == [plain["a"] + plain["b"] <= 1 for plain, _ in pairs]
    assert 70 < sum(kept) < 130


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        pytest.param({"epochs": 50}, {"epochs": 50, "warmup": 5, "scale": 2.5}, id="computed values follow"),
        pytest.param({"warmup": "own"}, None, id="another computed value"),
        pytest.param({"net": {"heads": 4}}, {"net.heads": 4, "net.dim": 64}, id="nested"),
    ],
)
def test_given_values_and_what_follows_from_them(part, changed):
    seed = next(seed for seed in range(99) if SPACE.sample(seed)["optimizer"]["name"] == "adam")
    if changed is None:
        with pytest.raises(SpaceError, match="`warmup` is given as 'own'"):
            SPACE.sample(seed, part)
        return
    assert flatten(SPACE.sample(seed, part)) == {**flatten(SPACE.sample(seed)), **changed}


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_whole_configuration_given_is_that_configuration(seed, other):
    config = SPACE.sample(other)
    assert SPACE.sample(seed, config) == config


@given(st.integers(0, 1000), st.floats(0, 1))
def test_a_given_value_of_a_computed_range_is_kept_exactly(seed, value):
    space = Space({"top": uniform(1, 2), "x": uniform(0, ref("top"))})
    assume(value != 0)
    assert space.sample(seed, {"x": value})["x"] == value


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"x": 3.5}, "`x` is given as 3.5, and the space has uniform(0, 2.0)"),
        ({"top": 0.5}, "`top` is given as 0.5, and the space has"),
        ({"low": 0.9, "high": 0.1}, "`low <= high` does not hold for low = 0.9, high = 0.1"),
        ({"n": 9}, "`n * m <= 16` does not hold for n = 9, m ="),
        ({"double": 3}, "`double` is given as 3, and the space has"),
    ],
)
def test_a_given_point_that_the_rules_refuse_names_values_and_rule(part, words):
    space = Space(
        {"top": choice([2.0]), "x": uniform(0, ref("top")), "low": uniform(0, 1), "high": uniform(0, 1),
         "n": randint(1, 10), "m": choice([2, 3]), "double": ref("n") * 2},
        where=[ref("n") * ref("m") <= 16], ordered=[("low", "high")],
    )  # fmt: skip
    with pytest.raises(SpaceError) as error:
        space.sample(0, part)
    assert words in str(error.value)


def test_faults_name_what_is_not_as_the_rules_say():
    config = SPACE.sample(0)
    assert SPACE.faults({**config, "scale": -1}) == ("`scale` is -1, and the space has warmup / 2",)
    faults = SPACE.faults({**config, "layers": 1, "width": 32})
    assert faults == ("`width` is 32, and the space has randint(8, 8 * layers + 1)",)
    ordered = Space({"a": uniform(0, 1), "b": uniform(0, 1)}, ordered=[("a", "b")])
    assert ordered.faults({"a": 0.9, "b": 0.1}) == ("`a <= b` does not hold for a = 0.9, b = 0.1",)
    zero = Space({"a": randint(0, 2), "b": 1}, where=[1 / a > 0])
    assert "division by zero" in zero.faults({"a": 0, "b": 1})[0]


def test_recomputed_values_follow_a_change_but_those_that_are_kept():
    space = Space(
        {
            "epochs": randint(1, 99),
            "warmup": ref("epochs") // 10,
            "net": {"twice": ref("warmup") * 2},
            "o": choice([{"lr": uniform(0, 1), "half": ref("o.lr") / 2}, {"name": "x"}]),
        }
    )
    config = {"epochs": 50, "warmup": 1, "net": {}, "o": {"lr": 0.5, "half": 7.0}}
    assert space.recomputed(config) == {"epochs": 50, "warmup": 5, "net": {"twice": 10}, "o": {"lr": 0.5, "half": 0.25}}
    assert space.recomputed(config, ["warmup", "o.half"]) == {**config, "net": {"twice": 2}}
    assert space.recomputed({"o": {"name": "x"}, "net": {}}) == {"o": {"name": "x"}, "net": {}}
    assert space.faults(space.recomputed(config)) == ()


def test_a_grid_has_the_points_that_the_conditions_allow():
    space = Space({"a": [1, 2, 3], "b": [1, 2, 3], "c": a * b}, where=[a < b])
    assert [tuple(point.values()) for point in space.grid()] == [(1, 2, 2), (1, 3, 3), (2, 3, 6)]
    assert space.count() == 9
    with pytest.raises(SpaceError, match=r"`b`: randint.* has other values in each configuration"):
        Space({"a": [1, 2], "b": randint(0, a)}).grid()


def test_a_bound_of_every_kind_can_be_computed():
    space = Space({"m": uniform(1, 2), "x": normal(ref("m"), ref("m") / 10), "y": loguniform(ref("m") / 100, ref("m"))})
    for seed in range(50):
        config = space.sample(seed)
        assert abs(config["x"] - config["m"]) < config["m"]
        assert config["m"] / 100 <= config["y"] <= config["m"]
