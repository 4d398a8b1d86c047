import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.cost.scaling import (
    fit_alpha,
    fit_beta,
    max_jobs_per_device,
    measured_scaling,
    packing_benefit,
    shared_device_scaling,
)


def packed(*means):
    """T^1, T^2 ... with trials that differ a little around these means."""
    return {p: [mean * (1 + 0.1 * (i - (p - 1) / 2)) for i in range(p)] for p, mean in enumerate(means, start=1)}


BENEFITS = {
    "perfect packing of two gives 1/2": (2, [1.0, 1.0], [1.0], 1 / 2),
    "perfect packing of the fourth gives 1/4": (4, [3.0] * 4, [3.0] * 3, 1 / 4),
    "none: two take twice as long": (2, [2.0, 2.0], [1.0], 0.0),
    "none: the third makes it 3/2": (3, [3.0] * 3, [2.0] * 2, 0.0),
    "harm: two take three times as long": (2, [3.0, 3.0], [1.0], -0.5),
    "means count, not each time": (2, [0.5, 2.5], [1.0], 0.25),
}


@pytest.mark.parametrize("name", BENEFITS)
def test_packing_benefit(name):
    trials, together, before, expected = BENEFITS[name]
    assert packing_benefit(trials, together, before) == pytest.approx(expected)


SHARING = {
    "perfect packing goes as far as was measured": (packed(1, 1, 1, 1), 0.05, 4),
    "no benefit": (packed(1, 2, 3), 0.05, 1),
    "up to the knee of a device with room for two": (packed(1, 1, 1.5, 2), 0.05, 2),
    "a threshold above what perfect packing gives": (packed(1, 1, 1, 1), 0.3, 3),
    "benefit equal to the threshold is not above it": (packed(1, 1, 1, 1), 0.25, 3),
    "recovery after harm is not a benefit": (packed(1, 3, 3, 3), 0.05, 1),
    "only one was measured": (packed(1), 0.05, 1),
    "what comes after a gap is not used": ({1: [1.0], 3: [1.0] * 3}, 0.05, 1),
}


@pytest.mark.parametrize("name", SHARING)
def test_max_jobs_per_device(name):
    times, threshold, expected = SHARING[name]
    assert max_jobs_per_device(times, threshold) == expected


def test_the_largest_p_above_the_threshold_may_be_worse_than_one_trial():
    times = packed(1, 3, 3.1)
    assert packing_benefit(3, times[3], times[2]) > 0.05
    assert 3 / 3.1 < 1, "three at once are slower than one after the other"
    assert max_jobs_per_device(times) == 1


@given(st.floats(1, 3), st.integers(2, 6), st.floats(0.001, 100))
def test_a_curve_without_noise_is_fitted_exactly(base, most, alone):
    assert fit_alpha({p: [alone * base ** (p - 1)] * p for p in range(1, most + 1)}) == pytest.approx(base)
    assert fit_beta({w: alone / w * base ** (w - 1) for w in range(1, most + 1)}) == pytest.approx(base)


def test_fits_in_logarithms_by_least_squares():
    # ln-ratios 0.1 at x = 1 and 0.5 at x = 2: (1*0.1 + 2*0.5) / (1 + 4) = 0.22
    e = 2.718281828459045
    assert fit_alpha({1: [1.0], 2: [e**0.1] * 2, 3: [e**0.5] * 3}) == pytest.approx(e**0.22)


def test_noise_does_not_make_an_overhead_a_gain():
    assert fit_alpha({1: [1.0], 2: [0.98, 0.99]}) == 1.0
    assert fit_beta({1: 1.0, 2: 0.49}) == 1.0


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=8),
    st.lists(st.floats(0.1, 10), min_size=0, max_size=4),
    st.integers(1, 8),
)
def test_a_measured_scaling_is_within_the_bounds_of_the_lemmas(packing, spreading, most):
    scaling = measured_scaling(
        {p: [time] * p for p, time in enumerate(packing, start=1)},
        dict(enumerate(spreading, start=1)),
        max_devices=most,
    )
    assert scaling.max_jobs == 1 or 1 <= scaling.alpha < scaling.max_jobs / (scaling.max_jobs - 1)
    assert scaling.devices == 1 or 1 <= scaling.beta < 1 + 1 / scaling.devices


def test_measured_scaling_takes_all_of_it_together():
    scaling = measured_scaling({1: [1.0], 2: [1.2, 1.2], 3: [1.44] * 3, 4: [3.0] * 4}, {1: 1.0, 2: 0.55}, max_devices=4)
    assert scaling.alpha == pytest.approx(1.2)
    assert scaling.beta == pytest.approx(1.1)
    assert (scaling.max_jobs, scaling.devices) == (3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: packing_benefit(1, [1.0], []), "at least 2 trials, got 1", id="one trial"),
        pytest.param(lambda: packing_benefit(2, [1.0, 0.0], [1.0]), r"with 2 must be .* \[1.0, 0.0\]", id="no time"),
        pytest.param(lambda: max_jobs_per_device({2: [1.0, 1.0]}), "with 1 must be measured", id="not alone"),
        pytest.param(lambda: fit_alpha({1: [1.0]}), "measure 2 as well", id="alone only"),
        pytest.param(lambda: fit_beta({2: 1.0}), "with 1 must be measured", id="not on one device"),
    ],
)
def test_missing_measurements_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


SCALINGS = {
    "nothing was seen": ({}, 2, None),
    "not of two": ({3: 1.0}, 2, (4, 1.0)),
    "one more than was seen": ({2: 1.0}, 1, (3, 1.0)),
    "as many as jobs ask for": ({2: 1.0}, 5, (5, 1.0)),
    "a second is worth little": ({2: 1.95}, 5, (1, 1.95)),
    "a second does harm": ({2: 2.5}, 5, (1, 2.5)),
    "a third is worth nothing": ({2: 1.3, 3: 2.0}, 5, (2, 1.3)),
    "a gap is filled": ({2: 1.3, 4: 9.0}, 1, (2, 1.3)),
    "one more would not be worth its part (Lemma 4)": ({2: 1.6}, 5, (2, 1.6)),
    "noise": ({2: 0.9}, 2, (3, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize(("crowding", "expected", "found"), SCALINGS.values(), ids=SCALINGS)
def test_how_many_are_to_share_a_device(crowding, expected, found):
    scaling = shared_device_scaling(crowding, expected)
    assert (scaling and (scaling.max_jobs, pytest.approx(scaling.alpha))) == found
