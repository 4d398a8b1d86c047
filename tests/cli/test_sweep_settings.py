"""What `shoal run --space` takes from a sweep of W&B beside its parameters."""

from pathlib import Path
from typing import Any

import pytest
import typer

from shoal import api
from shoal.cli.command import CommandRequest, run_command

SWEEP = """
program: train.py
method: bayes
metric: {name: accuracy, goal: maximize, target: 0.9}
run_cap: 20
early_terminate: {type: hyperband}
project: digits
parameters: {lr: {min: 0.1, max: 1.0}}
"""


def _tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = SWEEP, **options: Any) -> dict[str, Any]:
    """The arguments of `tune` with these options and a sweep."""
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(text)
    found: dict[str, Any] = {}
    monkeypatch.setattr(api, "tune", lambda task, space, **arguments: found.update(arguments))
    names = ("metric", "mode", "algorithm", "trials", "epochs", "time_limit", "loss")
    given = dict.fromkeys(names) | {"epochs": 9} | options
    run_command(CommandRequest(space=Path("sweep.yaml"), **given), ["true", "{lr}"])
    return {name: found.get(name) for name in ("metric", "mode", "target", "trials")}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        pytest.param({}, ("accuracy", "max", 0.9, 20), id="all"),
        pytest.param({"trials": 5}, ("accuracy", "max", 0.9, 5), id="another number of trials"),
        pytest.param({"metric": "accuracy", "mode": "max"}, ("accuracy", "max", 0.9, 20), id="the same"),
        pytest.param({"metric": "loss", "mode": "min"}, ("loss", "min", None, 20), id="another metric"),
        pytest.param({"algorithm": "hyperband"}, ("accuracy", "max", 0.9, None), id="an algorithm without a number"),
    ],
)
def test_a_sweep_gives_what_no_option_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], found: tuple[Any, ...]
) -> None:
    assert tuple(_tuned(tmp_path, monkeypatch, **options).values()) == found


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        pytest.param(
            SWEEP, {"mode": "min"}, "has goal: maximize for 'accuracy', and the mode is 'min'", id="another mode"
        ),
        pytest.param(SWEEP, {"metric": "loss"}, "is needed with --space", id="no mode of another metric"),
        pytest.param("method: grid\nparameters: {lr: {values: [1]}}", {}, "is needed with --space", id="no metric"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        _tuned(tmp_path, monkeypatch, text, **options)


@pytest.mark.parametrize(
    ("algorithm", "notes"),
    [
        (
            None,
            "program (the command after -- is run), method (choose --algorithm), "
            "early_terminate (choose an --algorithm that stops early), project",
        ),
        (
            "hyperband",
            "program (the command after -- is run), project, run_cap (hyperband finds the number of trials by itself)",
        ),
    ],
)
def test_what_is_not_taken_is_said_once_with_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    algorithm: str | None,
    notes: str,
) -> None:
    _tuned(tmp_path, monkeypatch, algorithm=algorithm)
    assert capsys.readouterr().err == f"shoal: of sweep.yaml is not taken: {notes}\n"


def test_in_python_another_goal_is_refused(tmp_path: Path) -> None:
    sweep = {"method": "grid", "metric": {"name": "loss", "goal": "minimize"}, "parameters": {"x": {"values": [1, 2]}}}
    with pytest.raises(api.ShoalError, match="has goal: minimize for 'loss', and the mode is 'max'"):
        api.tune(print, sweep, metric="loss", mode="max", trials=2, epochs=1, directory=tmp_path / "study")
    assert not (tmp_path / "study").exists()
