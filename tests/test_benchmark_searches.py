"""The benchmark of whole searches: its judgement names what is missed."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

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


def test_means_are_geometric() -> None:
    found = {
        "one": runs({"plain": 8, "pool": 4, "empty": 2, "full": 1}),
        "two": runs({"plain": 8, "pool": 4, "empty": 8, "full": 1}),
    }
    assert means(found) == {"empty_of_pool": 1.0, "empty_of_plain": 0.5, "full_of_pool": 0.25, "full_of_plain": 0.125}
