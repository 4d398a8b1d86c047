"""Metrics with their modes, and the Pareto front."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.constraint import parse_constraints
from shoal.core.epoch_order import EpochOrder
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective, objectives, pareto_front


def test_one_or_several():
    assert objectives("loss", "min") == (Objective("loss", "min"),)
    assert objectives(["a"], ["max"]) == (Objective("a", "max"),)
    assert objectives(("a", "b"), ["max", "min"]) == (Objective("a", "max"), Objective("b", "min"))


A, B = Objective("a", "max"), Objective("b", "min")


@pytest.mark.parametrize(
    ("metrics", "best", "better"),
    [
        pytest.param({"a": 1.0, "b": 5.0}, {}, True, id="the first"),
        pytest.param({"a": 2.0, "b": 9.0}, {"a": 1.0, "b": 5.0}, True, id="the first metric decides"),
        pytest.param({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 5.0}, False, id="of equal ones the earlier"),
        pytest.param({"a": 0.5, "b": 1.0}, {"a": 1.0, "b": 5.0}, False, id="worse"),
        pytest.param({"a": float("nan"), "b": 1.0}, {}, False, id="NaN"),
        pytest.param({"a": 2.0, "b": float("nan")}, {"a": 1.0, "b": 5.0}, False, id="another is NaN"),
        pytest.param({"a": 2.0}, {}, False, id="another is missing"),
        pytest.param({"a": float("-inf"), "b": 1.0}, {}, True, id="an infinity is a value"),
    ],
)
def test_an_epoch_is_the_best_if_it_is_better_than_all_before(metrics, best, better):
    assert EpochOrder((A, B)).improves(metrics, best) is better
    assert not EpochOrder().improves(metrics, best), "trials that rank by their last epochs have no best one"


def test_one_metric_decides_which_epoch_is_the_best():
    assert EpochOrder.of((A, B), (), "best", None).objectives == (A, B)
    assert EpochOrder.of((A, B), (), "best", "b").objectives == (B, A)
    assert EpochOrder.of((A, B), (), "last", None).objectives == ()


def test_an_epoch_that_keeps_the_constraints_is_better_than_one_that_does_not():
    order = EpochOrder((A,), parse_constraints({"ms": "<= 10"}))
    assert order.improves({"a": 0.1, "ms": 9.0}, {"a": 0.9, "ms": 11.0})
    assert not order.improves({"a": 0.9, "ms": 11.0}, {"a": 0.1, "ms": 9.0})
    assert order.improves({"a": 0.2, "ms": 9.0}, {"a": 0.1, "ms": 8.0})


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


class Counting(float):
    """A float that counts its comparisons."""

    compared = 0

    def __lt__(self, other):
        Counting.compared += 1
        return float(self) < float(other)

    def __le__(self, other):
        Counting.compared += 1
        return float(self) <= float(other)

    def __gt__(self, other):
        Counting.compared += 1
        return float(self) > float(other)

    def __ge__(self, other):
        Counting.compared += 1
        return float(self) >= float(other)


@pytest.mark.parametrize("objectives", [2, 3])
def test_a_long_front_is_swept(objectives, monkeypatch):
    monkeypatch.setattr(Counting, "compared", 0)
    points = {k: (k // 2, -(k // 2), k // 2 * 7 % 1000)[:objectives] for k in range(2000)}  # each twice
    counted = {k: tuple(map(Counting, point)) for k, point in points.items()}
    assert pareto_front(counted | {2000: tuple(map(Counting, (999.5, 0, 999.5)[:objectives]))}) == points.keys()
    assert Counting.compared < 40 * 2000


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 4)] * n), max_size=12)))
def test_the_front_is_what_nothing_dominates(points):
    def dominated(point):
        return any(other != point and all(x <= y for x, y in zip(other, point, strict=True)) for other in points)

    expected = {number for number, point in enumerate(points) if not dominated(point)}
    assert pareto_front(dict(enumerate(points))) == expected
