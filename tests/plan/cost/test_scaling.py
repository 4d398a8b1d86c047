from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.cost.scaling import Scaling

FACTORS = {
    "a whole device": (Scaling(2.0, 1.5), 1, 1.0),
    "half a device": (Scaling(alpha=1.5), 0.5, 1.5),
    "a quarter of a device": (Scaling(alpha=1.5), 0.25, 1.5**3),
    "sharing costs nothing": (Scaling(alpha=1.0), 0.1, 1.0),
    "the device is full: half of it takes twice as long": (Scaling(), 0.5, 2.0),
    "two devices": (Scaling(beta=1.1), 2, 0.55),
    "four devices": (Scaling(beta=1.1), 4, 1.1**3 / 4),
    "scaling costs nothing": (Scaling(beta=1.0), 8, 0.125),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factor(name):
    scaling, width, expected = FACTORS[name]
    assert scaling.factor(width) == pytest.approx(expected)


@given(st.integers(2, 16), st.floats(0, 0.99))
def test_within_the_limits_a_width_is_worth_it(most, part):
    """Fluid, Lemmas 4 and 6: a device finishes more of trials packed up to c, and a trial ends sooner on up to d."""
    scaling = Scaling(1 + part / (most - 1), 1 + part / most, most, most)
    rates = [p / scaling.factor(1 / p) for p in range(1, most + 1)]
    assert all(more > less for less, more in pairwise(rates))
    times = [scaling.factor(w) for w in range(1, most + 1)]
    assert all(more < less for less, more in pairwise(times))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.9}, "alpha must be finite and at least 1, got 0.9"),
        ({"beta": float("nan")}, "beta must be finite"),
        ({"max_jobs": 0}, "max_jobs must be an integer of at least 1, got 0"),
        ({"max_jobs": 1.5}, "max_jobs must be an integer of at least 1, got 1.5"),
        ({"devices": float("inf")}, "devices must be an integer"),
        ({"resize_seconds": -1.0}, "resize_seconds must be finite and not negative, got -1.0"),
    ],
    ids=str,
)
def test_impossible_scalings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Scaling(**changes)


@pytest.mark.parametrize("width", [0, -1.0, float("nan")])
def test_a_width_is_above_0(width):
    with pytest.raises(ValueError, match="above 0 devices"):
        Scaling().factor(width)


def test_an_overflow_is_infinite():
    assert Scaling(alpha=2.0, max_jobs=2000).factor(1 / 2000) == inf
    assert Scaling(beta=1.5, devices=3000).factor(3000) == inf
