"""The density against SciPy, and against the formula of each kernel done the slow way."""

import math
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shoal.algorithms.bohb import Density

NAN = float("nan")


def slow(points, options, bandwidths, x):
    """The mean of products of kernels at x, factor by factor."""
    total = 0.0
    for point in points:
        product = 1.0
        for own, at, count, h in zip(point, x, options, bandwidths, strict=True):
            if math.isnan(at):
                continue
            if math.isnan(own):
                product *= 1 / count if count else 1
            elif count:
                product *= 1 - h if own == at else h / (count - 1)
            else:
                product *= stats.truncnorm.pdf(at, (0 - own) / h, (1 - own) / h, loc=own, scale=h)
        total += product / len(points)
    return total


@st.composite
def mixed(draw):
    options = draw(st.lists(st.sampled_from([0, 0, 2, 3, 5]), min_size=1, max_size=4))
    kinds = [st.integers(0, count - 1).map(float) if count else st.floats(0, 1, width=32) for count in options]
    rows = st.tuples(*(kind | st.just(NAN) for kind in kinds))
    return options, draw(st.lists(rows, min_size=1, max_size=12)), draw(st.lists(rows, min_size=1, max_size=4))


@given(mixed())
@settings(deadline=None)
def test_the_density_is_the_mean_of_products_of_kernels(case):
    options, points, places = case
    density = Density(points, options, least=0.05)
    found = np.exp(density.log(places))
    assert found == pytest.approx([slow(points, options, density.bandwidths, x) for x in places], rel=1e-9, abs=1e-300)


def test_bandwidths_follow_the_normal_reference_rule():
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((40, 2)), rng.integers(0, 2, 40)])
    density = Density(points, [0, 0, 2], least=1e-3)
    # Of two options as of numbers: the standard deviation of 0s and 1s.
    assert density.bandwidths == pytest.approx(1.06 * points.std(axis=0) * 40 ** (-1 / 7))


def test_bandwidths_have_bounds_and_do_not_depend_on_the_order_of_options():
    alike = Density([[0.5, 1.0, NAN]] * 5, [0, 3, 0], least=0.01)
    assert alike.bandwidths == [0.01, 0.01, 0.01]
    spread = Density([[0.0], [1.0]], [2], least=0.01)
    assert spread.bandwidths == [pytest.approx(1.06 * 0.5 * 2 ** (-1 / 5))]
    every = Density([[float(i)] for i in range(2)], [2], least=0.9)
    assert every.bandwidths == [0.5], "with more, the option itself would be the least likely"
    one, other = ([[float(order[i % 3])] for i in (0, 0, 0, 1, 2)] for order in ((0, 1, 2), (1, 2, 0)))
    assert Density(one, [3], 0.01).bandwidths == Density(other, [3], 0.01).bandwidths


def test_the_density_integrates_to_one():
    density = Density([[0.02, 1.0], [0.4, NAN], [0.97, 0.0], [0.99, 2.0]], [0, 3], least=0.01)
    places = (np.arange(4000) + 0.5) / 4000
    assert sum(np.exp(density.log([[x, option] for x in places])).mean() for option in (0.0, 1.0, 2.0)) == (
        pytest.approx(1, abs=1e-6)
    )


def test_draws_near_a_point_follow_its_kernel():
    density = Density([[0.1, 2.0], [0.3, 0.0], [0.6, 2.0], [0.2, 1.0]], [0, 4], least=0.01)
    h, flat = density.bandwidths
    rng = Random(1)
    centre = [0.1, 2.0]
    numbers = [density.near(centre, 0, 2.0, rng) for _ in range(3000)]
    assert stats.kstest(numbers, stats.truncnorm(-0.1 / (2 * h), 0.9 / (2 * h), loc=0.1, scale=2 * h).cdf).pvalue > 0.01
    counts = Counter(density.near(centre, 1, 0.5, rng) for _ in range(3000))
    expected = [1000 * flat / 2, 1000 * flat / 2, 3000 * (1 - flat / 2), 1000 * flat / 2]
    assert stats.chisquare([counts[option] for option in range(4)], expected).pvalue > 0.01
    # However far they spread, no option is less likely than its share.
    counts = Counter(density.near(centre, 1, 50.0, rng) for _ in range(3000))
    assert stats.chisquare([counts[option] for option in range(4)]).pvalue > 0.01


def test_a_parameter_that_the_point_lacks_may_have_any_value():
    density = Density([[NAN, NAN]], [0, 3], least=0.01)
    rng = Random(0)
    centre = density.centre(rng)
    assert stats.kstest([density.near(centre, 0, 3.0, rng) for _ in range(2000)], "uniform").pvalue > 0.01
    counts = Counter(density.near(centre, 1, 3.0, rng) for _ in range(3000))
    assert stats.chisquare([counts[option] for option in range(3)]).pvalue > 0.01


def test_centres_are_the_points():
    points = [[0.1, 2.0], [0.3, NAN], [0.6, 0.0]]
    density = Density(points, [0, 3], least=0.01)
    rng = Random(0)
    assert {repr(density.centre(rng)) for _ in range(100)} == {repr(point) for point in points}
