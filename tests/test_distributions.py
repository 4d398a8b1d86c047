"""Domains with a distribution of their own shape."""

import math
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from shoal.core.distributions import LogNormal, LogRange, Normal, Ordinal, QLogUniform
from shoal.core.domain import Choice
from shoal.core.errors import SpaceError
from shoal.core.space import Space, choice, lognormal, logrange, normal, ordinal, qloguniform

quantiles = st.floats(0, 1)
positive = st.floats(1e-6, 1e6)
DOMAINS = st.one_of(
    st.builds(Normal, st.floats(-1e6, 1e6), positive),
    st.builds(
        lambda mean, sd, low, width: Normal(mean, sd, mean + low * sd, mean + (low + width) * sd),
        *(st.floats(-10, 10), positive, st.floats(-20, 20), st.floats(0.1, 10)),
    ),
    st.builds(Normal, st.floats(-10, 10), positive, st.none(), st.none(), st.floats(0.01, 10)),
    st.builds(LogNormal, positive, st.floats(1.01, 100)),
    st.builds(LogNormal, positive, st.floats(1.01, 100), st.floats(0.01, 10)),
    st.builds(
        lambda low, steps, step: QLogUniform(low, low + steps * step, step), positive, st.integers(1, 500), positive
    ),
    st.builds(
        lambda low, steps, step: QLogUniform(low, low + steps * step, step, integer=True),
        *(st.integers(1, 100), st.integers(1, 100), st.integers(1, 9)),
    ),
    st.builds(
        lambda low, factor, size: LogRange(low, low * factor, size),
        *(positive, st.floats(2, 1e6), st.integers(2, 50)),
    ),
    st.builds(
        lambda low, size: LogRange(low, low * 2 ** (size - 1), size, integer=True),
        *(st.integers(1, 9), st.integers(2, 20)),
    ),
    st.builds(Ordinal, st.lists(st.integers(), min_size=1, unique=True).map(tuple)),
    st.lists(positive, min_size=1, max_size=9).map(lambda weights: Choice(tuple(range(len(weights))), tuple(weights))),
)


@given(DOMAINS, st.integers(0, 2**32))
def test_a_sample_is_in_its_domain(domain, seed):
    assert domain.fault() is None
    value = domain.sample(Random(seed))
    assert domain.contains(value)
    assert 0 <= domain.quantile_of(value) <= 1
    config = Space({"x": domain}).sample(seed)
    assert Space({"x": domain}).faults(config) == ()


@given(DOMAINS, quantiles, quantiles)
def test_quantiles_ascend_with_values_and_values_with_quantiles(domain, first, second):
    first, second = sorted((first, second))
    values = domain.value_at(first), domain.value_at(second)
    places = [domain.optuna_value(value) if isinstance(domain, Ordinal) else value for value in values]
    assert places[0] <= places[1]
    assert domain.quantile_of(values[0]) <= domain.quantile_of(values[1])
    assert all(map(domain.contains, values)) or isinstance(domain, Choice)


@given(DOMAINS)
def test_json_keeps_the_domain(domain):
    space = Space({"x": domain})
    copy = Space.from_json(space.to_json())
    assert copy == space
    assert copy.sample(1) == space.sample(1)
    assert str(copy.domains()["x"][0]) == str(domain)


@given(DOMAINS, st.integers(0, 2**32))
def test_what_optuna_holds_stands_for_the_value(domain, seed):
    value = domain.sample(Random(seed))
    held = domain.optuna_value(value)
    distribution = domain.to_optuna()
    assert distribution._contains(distribution.to_internal_repr(held))
    back = domain.from_optuna_value(held)
    assert back == value if domain.count() else math.isclose(back, value, rel_tol=1e-6, abs_tol=1e-6)


def drawn(domain, n=4000):
    rng = Random(0)
    return [domain.sample(rng) for _ in range(n)]


def test_normal_has_its_mean_and_is_cut_off_and_not_clipped():
    values = drawn(normal(3, 2))
    assert fmean(values) == pytest.approx(3, abs=0.1)
    assert sum(1 < value < 5 for value in values) / len(values) == pytest.approx(0.683, abs=0.02)
    cut = drawn(normal(0, 1, low=0))
    assert min(cut) > 0
    assert fmean(cut) == pytest.approx(math.sqrt(2 / math.pi), abs=0.03)
    far = normal(0, 1, low=20, high=21)
    assert all(20 <= value <= 21 for value in drawn(far))
    assert fmean(drawn(far)) == pytest.approx(20.05, abs=0.01), "the mean of the tail above 20"


def test_lognormal_has_its_median_and_factor():
    values = drawn(lognormal(1e-3, 10))
    assert math.log10(median(values)) == pytest.approx(-3, abs=0.06)
    assert sum(1e-4 < value < 1e-2 for value in values) / len(values) == pytest.approx(0.683, abs=0.02)


@pytest.mark.parametrize(
    ("domain", "points"),
    [
        pytest.param(logrange(1, 8, 4), [1.0, 2.0, 4.0, 8.0], id="powers of 2"),
        pytest.param(logrange(1, 1000, 4), [1.0, 10.0, 100.0, 1000.0], id="powers of 10"),
        pytest.param(logrange(1e-4, 1e-1, 4), [1e-4, 1e-3, 1e-2, 1e-1], id="below 1"),
        pytest.param(logrange(16, 256, 5, integer=True), [16, 32, 64, 128, 256], id="integers"),
        pytest.param(qloguniform(1, 3, 0.5), [1.0, 1.5, 2.0, 2.5, 3.0], id="steps"),
        pytest.param(QLogUniform(2, 9, 2, integer=True), [2, 4, 6, 8], id="steps of integers"),
        pytest.param(ordinal(["none", "weak", "strong"]), ["none", "weak", "strong"], id="ordinal"),
    ],
)
def test_points(domain, points):
    assert list(domain.points()) == points
    assert [type(point) for point in domain.points()] == [type(point) for point in points]
    assert domain.count() == len(points)
    assert {*drawn(domain, 500)} == {*points}
    assert [config["x"] for config in Space({"x": domain}).grid()] == points


def test_weights_are_how_likely_options_are():
    values = [Space({"x": choice(["a", "b", "c"], weights=[1, 2, 5])}).sample(seed)["x"] for seed in range(2000)]
    shares = [values.count(each) / len(values) for each in "abc"]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.04)
    nested = Space({"x": choice([{"a": normal(0, 1)}, {"b": 1}], weights=[3, 1])})
    assert sum("a" in nested.sample(seed)["x"] for seed in range(1000)) == pytest.approx(750, abs=50)


@pytest.mark.parametrize(
    ("domain", "distribution"),
    [
        pytest.param(normal(0, 1), FloatDistribution(0, 1), id="normal"),
        pytest.param(lognormal(1, 2), FloatDistribution(0, 1), id="lognormal"),
        pytest.param(qloguniform(1, 10, 0.4), FloatDistribution(1.0, 9.8, log=True), id="qloguniform"),
        pytest.param(logrange(1, 8, 4), IntDistribution(0, 3), id="logrange"),
        pytest.param(ordinal(["a", "b"]), IntDistribution(0, 1), id="ordinal"),
        pytest.param(choice(["a", "b"], weights=[1, 2]), CategoricalDistribution(["a", "b"]), id="weights"),
    ],
)
def test_to_optuna(domain, distribution):
    assert domain.to_optuna() == distribution


@pytest.mark.parametrize(
    ("domain", "words"),
    [
        (normal(0, 0), "`x`: mean and sd must be finite numbers, sd above 0, got normal(0, 0)"),
        (normal(math.nan, 1), "mean and sd must be finite"),
        (normal(0, 1, 2, 1), "low must be below high, got normal(0, 1, 2, 1)"),
        (normal(0, 1, "a"), "low and high must be finite numbers or None"),
        (normal(0, 1, 50, 51), "the range from low to high has no probability"),
        (normal(0, 1e308), "too large"),
        (lognormal(0, 2), "median must be a number above 0"),
        (lognormal(1, 1), "factor one above 1"),
        (lognormal(1, 1e100), "beyond the floats"),
        (qloguniform(0, 1, 0.1), "low must be above 0"),
        (qloguniform(1, 2, 0), "step must be"),
        (logrange(0, 8, 4), "low must be above 0"),
        (logrange(1, 8, 1), "size must be an integer from 2"),
        (logrange(1, 8, 9, integer=True), "equal when rounded"),
        (logrange(1.5, 8, 2, integer=True), "low and high must be integers"),
        (ordinal([]), "at least one value"),
        (ordinal([1, 2, 1]), "each value once, got ordinal([1, 2, 1])"),
        (ordinal([object()]), "`x[0]`: a value must be None"),
        (choice([1, 2], weights=[1]), "a choice of 2 options has as many weights, not 1"),
        (choice([1, 2], weights=[1, 0]), "weights are numbers above 0, got choice([1, 2], weights=[1, 0])"),
    ],
)
def test_what_no_domain_can_be_is_refused_by_name(domain, words):
    with pytest.raises(SpaceError) as error:
        Space({"x": domain})
    assert words in str(error.value)


def test_weights_are_a_list():
    with pytest.raises(SpaceError, match="the weights of a choice are a list with a number for each option, got 3"):
        choice([1, 2], weights=3)


def test_an_ordinal_of_a_set_has_no_order():
    with pytest.raises(SpaceError, match=r"ordinal takes a list of options, got \{1\}"):
        ordinal({1})
