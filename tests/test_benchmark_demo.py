"""`make demo` names the figures that a machine misses, and fails for them only where it is asked to check."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import demo


@pytest.mark.parametrize(
    ("seconds", "check", "status"), [(0.0, False, 0), (0.0, True, 1), (1e9, True, 0)], ids=["shown", "checked", "met"]
)
def test_a_missed_figure_fails_only_a_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, check: bool, status: int
) -> None:
    study = SimpleNamespace(best_trial=SimpleNamespace(objective=0.9))
    monkeypatch.setattr(demo.shoal, "tune", lambda *args, **others: study)
    monkeypatch.setattr(demo, "in_a_fork", lambda *args: SimpleNamespace(seconds=seconds))
    monkeypatch.setattr(sys, "argv", ["demo.py", *["--check"] * check])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert demo.main() == status
    assert ("asked 1.3" in capsys.readouterr().out) is (seconds == 0)
