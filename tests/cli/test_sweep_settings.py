"""What a study takes from a sweep of W&B beside its parameters: in a file of `shoal run --space`, or in Python."""

from pathlib import Path
from typing import Any

import pytest
import typer

from shoal import Hyperband, Random, Space, api
from shoal.algorithms.base import Algorithm
from shoal.arguments import searched_space
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


@pytest.mark.parametrize(("options", "mode"), [({}, "min"), ({"mode": "max"}, "max")])
def test_a_goal_that_is_left_out_is_minimize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], mode: str
) -> None:
    text = SWEEP.replace(", goal: maximize", "")
    assert _tuned(tmp_path, monkeypatch, text, **options)["mode"] == mode


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        pytest.param(
            SWEEP, {"mode": "min"}, "has goal: maximize for 'accuracy', and the mode is 'min'", id="another mode"
        ),
        pytest.param(SWEEP, {"metric": "loss"}, "is needed with --space", id="no mode of another metric"),
        *(
            pytest.param(
                f"method: grid\nparameters: {{lr: {{values: [1]}}}}\n{key}", {}, "is needed with --space", id=name
            )
            for key, name in (("", "no metric"), ("metric:", "an empty metric"))
        ),
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
            "program (the task or command of the study is run), method (choose an algorithm), "
            "early_terminate (choose an algorithm that stops early), project",
        ),
        (
            "hyperband",
            "program (the task or command of the study is run), project, "
            "run_cap (`trials` or the algorithm says how many)",
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


@pytest.mark.parametrize(
    ("metric", "mode", "algorithm", "trials", "target", "notes"),
    [
        pytest.param(
            "accuracy",
            "max",
            None,
            5,
            None,
            "method (choose an algorithm), early_terminate (choose an algorithm that stops early), "
            "run_cap (`trials` or the algorithm says how many), metric.target (set the target of the study)",
            id="all",
        ),
        pytest.param(
            "loss",
            "min",
            Hyperband(9),
            None,
            None,
            "run_cap (`trials` or the algorithm says how many), metric (the study has another)",
            id="another metric",
        ),
        pytest.param(
            ("loss", "accuracy"),
            ("min", "max"),
            Random(20, 9),
            None,
            None,
            "metric.target (set the target of the study)",
            id="two metrics",
        ),
        pytest.param("accuracy", "max", Random(20, 9), None, 0.9, None, id="the same"),
    ],
)
def test_in_python_it_is_said_too(
    metric: Any,
    mode: Any,
    algorithm: Algorithm | None,
    trials: int | None,
    target: float | None,
    notes: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sweep = {
        "method": "bayes",
        "metric": {"name": "accuracy", "goal": "maximize", "target": 0.9},
        "run_cap": 20,
        "early_terminate": {"type": "hyperband"},
        "parameters": {"lr": {"min": 0.1, "max": 1.0}},
    }
    assert searched_space(sweep, metric, mode, algorithm, trials, target) == Space(sweep)
    assert caplog.messages == ([f"of the W&B sweep is not taken: {notes}"] if notes else [])


def test_a_study_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sweep = {"method": "grid", "run_cap": 20, "parameters": {"x": {"values": [1, 2]}}}
    with pytest.raises(api.ShoalError, match="`directory`"):
        api.tune(print, sweep, metric="loss", mode="min", trials=2, epochs=1, directory=3)  # type: ignore[arg-type]
    assert caplog.messages == [
        "of the W&B sweep is not taken: method (choose an algorithm), run_cap (`trials` or the algorithm says how many)"
    ]


def test_in_python_another_goal_is_refused(tmp_path: Path) -> None:
    sweep = {"method": "grid", "metric": {"name": "loss", "goal": "minimize"}, "parameters": {"x": {"values": [1, 2]}}}
    with pytest.raises(api.ShoalError, match="has goal: minimize for 'loss', and the mode is 'max'"):
        api.tune(print, sweep, metric="loss", mode="max", trials=2, epochs=1, directory=tmp_path / "study")
    assert not (tmp_path / "study").exists()
