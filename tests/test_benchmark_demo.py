"""`make demo` names the figures that a machine misses, and fails for them only where it is asked to check."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import demo

ROOT = Path(__file__).parents[1]
ANSWER = SimpleNamespace(seconds=1.0, best=0.9)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways of the comparison, in the order in which they took turns; nothing is searched."""
    ways: list[str] = []
    study = SimpleNamespace(best_trial=SimpleNamespace(objective=0.9, number=3), directory=ROOT / "runs" / "a study")

    def run(function: Any, search: Any, task: Any, quick: bool, way: str) -> SimpleNamespace:
        ways.append(way)
        return ANSWER

    monkeypatch.setattr(demo.shoal, "tune", lambda *args, **others: study)
    monkeypatch.setattr(demo, "in_a_fork", run)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SHOAL_CACHE", "before")
    return ways


@pytest.mark.parametrize(
    ("loop", "check", "status"), [(3.0, False, 0), (3.0, True, 1), (5.0, True, 0)], ids=["shown", "checked", "met"]
)
def test_a_missed_figure_fails_only_a_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loop: float, check: bool, status: int
) -> None:
    seconds = {"empty": 1.0, "pool": 2.0, "plain": loop}
    monkeypatch.setattr(demo, "in_a_fork", lambda *given: SimpleNamespace(seconds=seconds[given[-1]], best=0.9))
    monkeypatch.setattr(sys, "argv", ["demo.py", *["--check"] * check])
    assert demo.main() == status
    out = capsys.readouterr().out
    assert f"{demo.POOL}: 4.0 s, 2.0 times as long" in out
    assert ("asked at least 4" in out) is (check and bool(status))


def test_ways_take_turns_in_both_orders_and_the_next_commands_come_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    demo.main()
    assert asked == ["empty", "pool", "plain", "plain", "pool", "empty"]
    first, *_, last = lines = capsys.readouterr().out.splitlines()[-4:]
    assert first.endswith(f"shoal status '{ROOT}/runs/a study'")
    assert last.endswith(f"shoal export '{ROOT}/runs/a study' 3")
    assert all(Path(line.split("/shoal ")[0].strip()).is_dir() for line in lines)


def test_the_histories_that_it_deletes_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(demo, "in_a_fork", lambda *given: seen.append(demo.os.environ["SHOAL_CACHE"]) or ANSWER)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--quick"])
    demo.main()
    assert len(set(seen)) == 1
    assert not Path(seen[0]).parent.exists(), "in a temporary folder"
