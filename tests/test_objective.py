"""Metrics with their modes, and the Pareto front."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import objective
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective, objectives, pareto_front


def test_one_or_several():
    assert objectives("loss", "min") == (Objective("loss", "min"),)
    assert objectives(["a"], ["max"]) == (Objective("a", "max"),)
    assert objectives(("a", "b"), ["max", "min"]) == (Objective("a", "max"), Objective("b", "min"))


@pytest.mark.parametrize(
    ("metric", "mode", "message"),
    [
        ("loss", "least", '`mode` must be "min" or "max", got \'least\''),
        ("loss", ["min"], '`mode` must be "min" or "max" where `metric` is one name, got [\'min\']'),
        (["a", "b"], "min", '`mode` must be "min" or "max" for each of the 2 metrics, a list as long, got \'min\''),
        (["a", "b"], ["min"], '`mode` must be "min" or "max" for each of the 2 metrics, a list as long, got [\'min\']'),
        (["a", "b"], ["min", "mean"], '`mode` must be "min" or "max", got \'mean\''),
        (["a", "a"], ["min", "max"], "`metric` must name each metric once, got ['a', 'a']"),
        ([], [], "`metric` must be the name of a reported value, or a list of such names, got []"),
        (3, "min", "`metric` must be the name of a reported value, or a list of such names, got 3"),
    ],
)
def test_bad_ones(metric, mode, message):
    with pytest.raises(AlgorithmError) as error:
        objectives(metric, mode)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({}, set()),
        ({7: (1.0,)}, {7}),
        ({0: (2.0,), 1: (1.0,), 2: (1.0,)}, {1, 2}),
        ({0: (1.0, 3.0), 1: (2.0, 2.0), 2: (3.0, 1.0), 3: (2.0, 3.0)}, {0, 1, 2}),
        ({0: (1.0, 1.0), 1: (1.0, 2.0), 2: (1.0, 1.0)}, {0, 2}),
        ({0: (float("inf"), 0.0), 1: (0.0, float("inf")), 2: (float("inf"), float("inf"))}, {0, 1}),
    ],
)
def test_front(losses, best):
    assert pareto_front(losses) == best


def test_a_long_front_of_two_objectives_is_swept(monkeypatch):
    compared = []
    dominates = objective._dominates
    monkeypatch.setattr(objective, "_dominates", lambda *pair: (compared.append(pair), dominates(*pair))[1])
    points = {number: (number // 2, -(number // 2)) for number in range(2000)}  # each twice
    assert pareto_front(points | {2000: (999.5, 0)}) == points.keys()
    assert len(compared) == 2000


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 4)] * n), max_size=12)))
def test_the_front_is_what_nothing_dominates(points):
    def dominated(point):
        return any(other != point and all(x <= y for x, y in zip(other, point, strict=True)) for other in points)

    expected = {number for number, point in enumerate(points) if not dominated(point)}
    assert pareto_front(dict(enumerate(points))) == expected
