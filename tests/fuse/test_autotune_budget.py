"""The time budget of the autotuner bounds measurements when new shapes never end."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.fuse.autotune import TuningBudget, autotuning, fastest


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


RACE = Clock()
"""By which ways are timed."""


@pytest.fixture(autouse=True)
def race_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fuse.autotune._now", lambda device: RACE.now)


class Ways(dict[str, Callable[[Tensor], Tensor]]):
    """Ways of doubling a tensor: one is the faster for up to 100 rows, one for more.

    Args:
        clock: of the budget; shows more with every run.
        seconds: how much.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.ran: list[str] = []
        super().__init__({name: self._way(name, clock, seconds) for name in ("few", "many")})

    def _way(self, name: str, clock: Clock, seconds: float) -> Callable[[Tensor], Tensor]:
        def way(x: Tensor) -> Tensor:
            self.ran.append(name)
            clock.now += seconds
            RACE.now += 0.0005 if (name == "few") == (len(x) <= 100) else 0.003
            return x * 2

        return way

    def last(self, x: Tensor) -> str:
        """The way that is taken in the end."""
        assert torch.equal(fastest("double", self, [x]), x * 2)
        return self.ran[-1]

    def races(self, x: Tensor) -> bool:
        """Whether it was measured first."""
        before = len(self.ran)
        self.last(x)
        return len(self.ran) > before + 1


def rows(count: int) -> Tensor:
    return torch.ones(count, 2)


def test_races_take_an_allowance_and_then_a_share_of_the_time(tmp_path: Path) -> None:
    clock = Clock()
    ways = Ways(clock, 0.3)
    with autotuning(tmp_path / "lowerings.jsonl", TuningBudget(clock)):
        measured = [ways.races(rows(2**count)) for count in range(20)]
        assert 1 < sum(measured) < 15
        assert measured == sorted(measured, reverse=True)
        assert ways.races(rows(2**20).double()), "nothing is known of the like"
        clock.now += 1000
        assert ways.races(rows(2**21))
        assert not ways.races(rows(2**19)), "what was taken over stays"


def test_a_new_shape_goes_the_way_of_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "lowerings.jsonl"
    clock = Clock()
    ways = Ways(clock, 0.0)
    with autotuning(path, TuningBudget(clock)):
        assert ways.last(rows(4)) == "few"
        assert ways.last(rows(1000)) == "many"
        assert Ways(clock, 10.0).races(rows(1000).double())  # takes more than there is
        written = path.read_text()
        nearest = {1: "few", 40: "few", 90: "many", 5000: "many"}  # 4 and 1000 are equally far from 63
        assert {count: ways.last(rows(count)) for count in nearest} == nearest
        assert path.read_text() == written


def test_a_way_that_is_not_offered_is_not_taken_over(tmp_path: Path) -> None:
    clock = Clock()
    with autotuning(tmp_path / "lowerings.jsonl", TuningBudget(clock)):
        assert Ways(clock, 10.0).last(rows(4)) == "few"
        others = Ways(clock, 10.0)
        others["other"] = others.pop("few")
        assert others.races(rows(5))


def test_what_is_read_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lowerings.jsonl"
    clock = Clock()
    with autotuning(path, TuningBudget(clock)):
        Ways(clock, 0.1).last(rows(4))
    with autotuning(path, TuningBudget(clock)):
        ways = Ways(clock, 10.0)
        assert not ways.races(rows(4))
        assert not ways.races(rows(5)), "nearly the same size"
        assert ways.races(rows(8))
        assert not ways.races(rows(16))


@pytest.mark.parametrize(("spent", "passed", "left"), [(0, 0, True), (19, 0, True), (30, 0, False), (30, 201, True)])
def test_budget(spent: float, passed: float, left: bool) -> None:
    clock = Clock()
    budget = TuningBudget(clock)
    assert budget.left()
    with budget.charged():
        clock.now += spent
    clock.now += passed
    assert budget.left() == left
