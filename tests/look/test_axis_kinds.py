"""Axes of parameters with other distributions, and of those that depend on others."""

import pytest

from shoal.core.reference import ref
from shoal.core.space import (
    Space,
    choice,
    lognormal,
    logrange,
    normal,
    ordinal,
    qloguniform,
    randint,
    uniform,
)
from shoal.look.axis import axes


@pytest.mark.parametrize(
    ("domain", "labels", "log"),
    [
        (ordinal(["weak", "strong"]), ("weak", "strong"), False),
        (logrange(8, 64, 4, integer=True), ("8", "16", "32", "64"), False),
        (choice(["a", "b"], weights=[1, 3]), ("a", "b"), False),
        (normal(0, 1), ("-3.1..-2.1", "-2.1..-1", "-1..0", "0..1", "1..2.1", "2.1..3.1"), False),
        (normal(0, 1, low=0, high=6), None, False),
        (lognormal(1, 2), None, True),
        (qloguniform(1, 100, 1), None, True),
        (logrange(1, 1000, 20), None, True),
    ],
)
def test_an_axis_of_each_kind(domain, labels, log):
    (axis,) = axes(Space({"x": domain}))
    assert axis.log is log
    assert labels is None or axis.labels == labels
    assert len(axis.labels) == len(labels or range(6))
    for seed in range(50):
        value = Space({"x": domain}).sample(seed)["x"]
        position = axis.position(value)
        assert 0 <= position < len(axis.labels)
        if position in axis.bins and 0 < position < len(axis.labels) - 1:
            assert axis.edges[position] <= value <= axis.edges[position + 1]


def test_a_computed_value_is_no_axis_and_a_computed_range_is_one_as_wide_as_its_values():
    space = Space({"n": randint(1, 5), "twice": ref("n") * 2, "x": uniform(0, ref("n")), "k": randint(0, 2 * ref("n"))})
    found = {axis.name: axis for axis in axes(space)}
    assert list(found) == ["n", "x", "k"]
    assert 0 <= found["x"].edges[0] < 0.2
    assert 3.5 < found["x"].edges[-1] <= 4
    assert found["k"].edges[0] == 0
    assert found["k"].edges[-1] == 8


def test_a_range_that_can_never_be_computed_is_no_axis():
    assert axes(Space({"n": 0, "x": uniform(0, 1 / ref("n"))})) == ()
