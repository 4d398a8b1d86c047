"""The hypervolume of a front, and its reference."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import fronts
from shoal.core.errors import AlgorithmError
from shoal.core.hypervolume import Hypervolume, dominated_volume, hypervolume, reference_point
from shoal.core.objective import objectives

BOTH = objectives(["accuracy", "latency"], ["max", "min"])


@pytest.mark.parametrize(
    ("points", "reference", "volume"),
    [
        pytest.param([], (1, 1), 0.0, id="none"),
        pytest.param([(0, 0)], (2, 3), 6.0, id="one point"),
        pytest.param([(0, 2), (1, 1), (2, 0)], (3, 3), 6.0, id="a staircase"),
        pytest.param([(0, 2), (1, 1), (1, 1), (2, 2)], (3, 3), 5.0, id="equal and dominated points add nothing"),
        pytest.param([(0, 5), (5, 0), (3, 3)], (3, 3), 0.0, id="beyond the reference"),
        pytest.param([(0, 0, 0)], (1, 2, 3), 6.0, id="three losses"),
        pytest.param([(0, 1, 1), (1, 0, 1), (1, 1, 0)], (2, 2, 2), 4.0, id="three corners"),
        pytest.param([(-math.inf, 3), (0, 0)], (3, 3), 9.0, id="an infinite strip of no height is beyond"),
        pytest.param([(-math.inf, 0), (-math.inf, 1), (0, -math.inf)], (3, 3), math.inf, id="infinitely good"),
        pytest.param([(0, 0, -math.inf), (1, 1, -math.inf)], (3, 3, 3), math.inf, id="infinitely good in the third"),
    ],
)
def test_volumes(points: list[tuple[float, ...]], reference: tuple[float, ...], volume: float) -> None:
    assert dominated_volume(points, reference) == volume


@given(st.integers(2, 3).flatmap(lambda k: st.lists(st.tuples(*[st.integers(0, 4)] * k), max_size=6)))
def test_it_counts_the_unit_cells_that_are_dominated(points: list[tuple[int, ...]]) -> None:
    size = len(points[0]) if points else 2
    cells = product(range(4), repeat=size)
    dominated = sum(any(all(x <= c for x, c in zip(p, cell, strict=True)) for p in points) for cell in cells)
    assert dominated_volume(points, (4,) * size) == dominated


@pytest.mark.parametrize("size", [2, 3])
def test_each_point_is_added_once_to_a_staircase(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rectangles: list[float] = []
    area = fronts._area
    monkeypatch.setattr(fronts, "_area", lambda *sides: (rectangles.append(area(*sides)), rectangles[-1])[1])
    points = [(k, 500 - k, k * 7 % 500)[:size] for k in range(500)]
    assert dominated_volume(points, (501,) * size) > 0
    assert 500 <= len(rectangles) <= 2 * 500


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([(0.5, 2.0), (0.25, 1.0)], (0.225, 2.2), id="the worst of each"),
        pytest.param([(0.5, -2.0)], (0.45, -1.8), id="a negative loss"),
        pytest.param([(0.0, 0.0)], (-1e-12, 1e-12), id="zero"),
        pytest.param([(0.5, math.inf), (0.5, 1.0)], (0.45, 1.1), id="infinities do not count"),
        pytest.param([(0.5, math.inf)], None, id="no finite value"),
        pytest.param([], None, id="no trial"),
    ],
)
def test_the_reference_is_that_of_optuna(
    values: list[tuple[float, float]], expected: tuple[float, float] | None
) -> None:
    found = reference_point(values, BOTH)
    assert found == (None if expected is None else pytest.approx(expected))


def test_values_are_those_of_the_metrics() -> None:
    assert hypervolume([(0.75, 1.0), (1.0, 2.0)], BOTH, (0.5, 3)) == Hypervolume(0.25 * 2 + 0.25 * 1, (0.5, 3))


@pytest.mark.parametrize(
    ("names", "reference", "words"),
    [
        (["a"], (1,), r"of 2 to 3 metrics; this study has 1"),
        (["a", "b", "c", "d"], (1,) * 4, r"of 2 to 3 metrics; this study has 4"),
        (["a", "b"], (1,), r"`reference` must be a finite value of each of the metrics \['a', 'b'\], got \(1,\)"),
        (["a", "b"], (1, math.inf), r"`reference` must be a finite value"),
        (["a", "b"], (1, "2"), r"`reference` must be a finite value"),
    ],
)
def test_refusals(names: list[str], reference: tuple[object, ...], words: str) -> None:
    with pytest.raises(AlgorithmError, match=words):
        hypervolume([], objectives(names, ["min"] * len(names)), reference)  # type: ignore[arg-type]
