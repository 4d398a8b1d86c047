"""The order of trials: by violation, front, epsilon-net and number."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.constraint import parse_constraints
from shoal.core.objective import objectives, pareto_front
from shoal.core.score import Score, order, score_of, worst_score

INF = math.inf


def feasible(*points: tuple[float, ...]) -> dict[int, Score]:
    return {number: Score(False, 0.0, point) for number, point in enumerate(points)}


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        pytest.param({}, [], id="none"),
        pytest.param(feasible((3.0,), (1.0,), (3.0,), (2.0,)), [1, 3, 0, 2], id="one loss, ties by number"),
        pytest.param(feasible((2.0, 2.0), (3.0, 3.0), (1.0, 1.0)), [2, 0, 1], id="places, not an argsort"),
        pytest.param(feasible((0.0, 4.0), (1.0, 3.0), (4.0, 0.0), (2.0, 1.0)), [0, 2, 3, 1], id="epsilon-net"),
        pytest.param(feasible((0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0)), [0, 2, 1, 3], id="equal points last"),
        pytest.param(feasible((1.0, 7.0), (1.0, 7.0)), [0, 1], id="all equal"),
        pytest.param(feasible((5.0, 0.0, 1.0), (5.0, 1.0, 0.0), (5.0, 0.4, 0.4)), [0, 1, 2], id="a constant metric"),
        pytest.param(feasible((-INF, 2.0), (1.0, 1.0), (INF, 0.0), (INF, INF)), [0, 2, 1, 3], id="infinities"),
        pytest.param(feasible((1e308, -1e308), (-1e308, 1e308), (0.0, 0.0)), [1, 0, 2], id="no overflow"),
        pytest.param(
            {0: Score(False, 0.5, (0.0,)), 1: Score(False, 0.0, (9.0,)), 2: Score(False, 0.1, (5.0,))},
            [1, 2, 0],
            id="feasible first, then the least violation",
        ),
        pytest.param(
            {0: Score(False, INF, (1.0, 2.0)), 1: worst_score(2), 2: Score(False, INF, (0.0, 0.0)), 3: worst_score(2)},
            [2, 0, 1, 3],
            id="NaN after an infinite violation; fronts among equal violations",
        ),
    ],
)
def test_order(scores: Mapping[int, Score], expected: list[int]) -> None:
    assert order(scores) == expected


_POINTS = st.integers(2, 4).flatmap(lambda k: st.lists(st.tuples(*[st.integers(0, 4).map(float)] * k), max_size=14))


@given(_POINTS)
def test_fronts_follow_each_other(points: list[tuple[float, ...]]) -> None:
    found, left = order(feasible(*points)), dict(enumerate(points))
    while left:
        front = pareto_front(left)
        assert set(found[: len(front)]) == front
        found = found[len(front) :]
        left = {number: point for number, point in left.items() if number not in front}
    assert found == []


@given(_POINTS, st.randoms(use_true_random=False))
def test_the_order_of_reports_does_not_matter(points: list[tuple[float, ...]], random: object) -> None:
    scores = list(feasible(*points).items())
    expected = order(dict(scores))
    random.shuffle(scores)  # type: ignore[attr-defined]
    assert order(dict(scores)) == expected


def test_a_long_front_is_ranked_as_a_set() -> None:
    scores = feasible(*((float(k), -float(k)) for k in range(1001)))
    found = order(scores)
    assert found[:3] == [0, 1000, 500]
    assert sorted(found) == list(range(1001))


def test_the_score_of_a_report() -> None:
    goals, bounds = objectives(["a", "b"], ["max", "min"]), parse_constraints({"c": "<= 10"})
    metrics = {"a": 1.0, "b": 2.0, "c": 15.0}
    assert score_of((1.0, 2.0), metrics, goals, bounds) == Score(False, 0.5, (-1.0, 2.0))
    assert score_of((1.0, 2.0), metrics, goals) == Score(False, 0.0, (-1.0, 2.0))
    assert score_of((1.0, math.nan), metrics, goals, bounds) == worst_score(2)
