"""Fronts that are sorted as trials come."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import fronts
from shoal.core.fronts import SortedFronts
from shoal.core.score import Score, order

_LOSS = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf])
_POINTS = st.integers(2, 4).flatmap(lambda k: st.lists(st.tuples(*[_LOSS] * k), min_size=1, max_size=12))


@given(_POINTS, st.sets(st.integers(0, 11), min_size=1))
def test_ranks_are_those_of_the_order_of_all_trials(points: list[tuple[float, ...]], wanted: set[int]) -> None:
    ranking = SortedFronts()
    for number, point in enumerate(points):
        ranking.add(number, point)
        expected = order({each: Score(False, 0.0, losses) for each, losses in enumerate(points[: number + 1])})
        assert [ranking.rank(each) for each in expected] == list(range(number + 1))
        if best := next(((rank, each) for rank, each in enumerate(expected) if each in wanted), None):
            assert ranking.best_of(wanted) == best
    assert len(ranking) == len(points)


@pytest.mark.parametrize("metrics", [2, 3])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0], ids=["a chain", "nearly a chain", "a cloud"])
def test_a_new_trial_is_compared_with_few_fronts(metrics: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    dominates = fronts._Front.dominates
    monkeypatch.setattr(
        fronts._Front,
        "dominates",
        lambda one, other: (compared.append(len(one) * len(other)), dominates(one, other))[1],
    )
    rng, ranking = random.Random(0), SortedFronts()
    for number in range(300):
        level = rng.random()
        ranking.add(number, tuple(level + spread * rng.random() for _ in range(metrics)))
    assert len(compared) < 30 * 300
    assert sum(compared) < 400 * 300
