"""The benchmark of whole searches: its judgement names what is missed."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu_search
from search_tasks.registry import SEARCHES
from searches import Measured, Run, means

LINEAR = SEARCHES["200 linear"]


def runs(seconds: Mapping[str, float], best: float = 0.9, spent: float = 1.0) -> Measured:
    """One run of each way; Shoal's activities sum to `spent` times the time of two slots."""
    made = {}
    for way, took in seconds.items():
        wall = took if way in ("empty", "full") else 0.0
        made[way] = [Run(took, best if way == "full" else 0.9, wall, {"steps": 2 * wall * spent} if wall else {})]
    return Measured(LINEAR, made)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        pytest.param(runs({"plain": 40, "pool": 20, "empty": 20, "full": 19}), [], id="all reached"),
        pytest.param(runs({"plain": 40, "pool": 9, "empty": 9.5, "full": 8}), [], id="a short search may take longer"),
        pytest.param(
            runs({"plain": 40, "pool": 20, "empty": 21, "full": 19.5}),
            ["empty history 1.05 of the pool, asked 1.0", "full history 0.97 of the pool, asked 0.95"],
            id="slower than the pool",
        ),
        pytest.param(
            runs({"plain": 40, "pool": 9, "empty": 9.75, "full": 8}),
            ["empty history 0.75 s over the pool, asked 0.5"],
            id="a short search takes too long",
        ),
        pytest.param(
            runs({"plain": 40, "pool": 20, "empty": 15, "full": 10}, best=0.8, spent=1.05),
            [
                "activities differ by 5.0% from the time of the slots, asked 2%",
                "best accuracy from 0.8000 to 0.9000, asked 0.02",
            ],
            id="other results, and time of which nothing is known",
        ),
    ],
)
def test_what_is_missed_is_named(found: Measured, missed: list[str]) -> None:
    assert found.missed() == missed


@pytest.mark.parametrize(
    ("configurations", "seconds", "missed"),
    [
        pytest.param(8, {"plain": 10, "pool": 1, "empty": 6, "full": 3}, [], id="all reached"),
        pytest.param(
            8, {"plain": 10, "empty": 7}, ["8: 0.70 of the plain's seconds, asked 0.6"], id="of the plain loop"
        ),
        pytest.param(
            32,
            {"plain": 20, "pool": 8, "empty": 6, "full": 5},
            [
                "32: 0.75 of the pool's seconds, asked 0.7",
                "32: a second search has 0.80 of the first one's overhead, asked 0.5",
            ],
            id="of the pool and of the first",
        ),
        pytest.param(3, {"plain": 1, "empty": 2}, [], id="another number of configurations"),
        pytest.param(8, {"empty": 9}, [], id="nothing to compare with"),
    ],
)
def test_what_a_search_on_a_gpu_misses_is_named(
    configurations: int, seconds: dict[str, float], missed: list[str]
) -> None:
    spent = {"steps": 1.0, "start": 0.5}
    found = {way: gpu_search.Run(took, 2.3, spent if way in ("empty", "full") else {}) for way, took in seconds.items()}
    assert gpu_search.judged(configurations, found) == missed


def test_means_are_geometric() -> None:
    found = {
        "one": runs({"plain": 8, "pool": 4, "empty": 2, "full": 1}),
        "two": runs({"plain": 8, "pool": 4, "empty": 8, "full": 1}),
    }
    assert means(found) == {"empty_of_pool": 1.0, "empty_of_plain": 0.5, "full_of_pool": 0.25, "full_of_plain": 0.125}
