"""Studies with constraints and with several metrics: live, killed and gone on with, and as the commands show them."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import tune
from typer.testing import CliRunner

import shoal
from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.api import resume
from shoal.cli.app import app
from shoal.core.errors import AlgorithmError, ShoalError, TaskError
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.look.overview import notebook_html, overview
from shoal.look.snapshot import snapshot
from shoal.look.text import best_text

SPACE = {"lr": shoal.loguniform(0.001, 0.3), "width": shoal.choice([6, 8])}
KILLED_SPACE = {"lr": shoal.loguniform(0.001, 0.3), "width": shoal.choice([6, 8]), "momentum": 0.9, "step_size": 2}
GOALS: dict[str, Any] = {
    "metric": ("accuracy", "valid_loss"),
    "mode": ("max", "min"),
    "constraints": {"valid_loss": "<= 1.05"},
}

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "asha": lambda: shoal.ASHA(6, max_epochs=4, eta=2, concurrency=3),
    "asha, tpe": lambda: shoal.ASHA(6, max_epochs=4, eta=2, concurrency=3, sampler="tpe"),
    "successive_halving": lambda: shoal.SuccessiveHalving(6, max_epochs=4, eta=2),
    "hyperband": lambda: shoal.Hyperband(max_epochs=4, eta=2),
    "pbt": lambda: shoal.PBT(4, epochs=4),
    "optuna": lambda: shoal.OptunaSearch(6, epochs=2, concurrency=3),
    "random": lambda: shoal.Random(6, epochs=2),
}

PROGRAM = """
import signal, sys
from pathlib import Path
sys.path[:] = {path!r}
import shoal, tasks
from plain import tune
from test_constraints import ASHA, GOALS, KILLED_SPACE
tune(tasks.Signals(signal.SIGKILL, Path({marker!r})), KILLED_SPACE, Path({directory!r}),
     algorithm=ASHA(6, max_epochs=8, eta=2, min_epochs=4, concurrency=1), checkpoint_seconds=0.0, **GOALS)
print("complete")
"""


def said(directory: Path, *words: str) -> str:
    done = CliRunner().invoke(app, [words[0], str(directory), *words[1:]])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_takes_both_live_and_a_replay_repeats_it(name: str, tmp_path: Path) -> None:
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=ALGORITHMS[name](), **GOALS)
    rows = study.trials
    assert {row.state for row in rows} <= {TrialState.COMPLETE, TrialState.STOPPED}
    for row in rows:
        assert row.violation == pytest.approx(max(0.0, row.metrics["valid_loss"] - 1.05) / 1.05)
    front = study.pareto
    assert all(row.violation == 0 for row in front)
    assert len({row.number for row in front}) == len(front)
    again = resume(study.directory, show_progress=False)
    assert [(row.config, row.state, row.epoch) for row in again.trials] == [
        (row.config, row.state, row.epoch) for row in rows
    ]


def test_a_killed_study_with_both_goes_on(
    shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=sys.path, marker=str(tmp_path / "sent"), directory=str(tmp_path / "study")))
    done = shoal("run", program, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    study = resume(tmp_path / "study", show_progress=False)
    algorithm = ASHA(6, max_epochs=8, eta=2, min_epochs=4, concurrency=1)
    whole = tune(tasks.Momentum(), KILLED_SPACE, tmp_path / "whole", algorithm=algorithm, **GOALS)
    assert [(row.state, row.epoch, row.reason) for row in study.trials] == [
        (row.state, row.epoch, row.reason) for row in whole.trials
    ]
    assert [row.number for row in study.pareto] == [row.number for row in whole.pareto]


def test_the_best_trial_is_feasible_and_the_others_are_marked(tmp_path: Path) -> None:
    algorithm = shoal.Random(6, 2)
    plain = tune(tasks.Blobs(), SPACE, tmp_path / "plain", algorithm=algorithm)
    losses = sorted(row.metrics["valid_loss"] for row in plain.trials)
    bound = f">= {(losses[2] + losses[3]) / 2}"  # three of six keep it, and they are not the best
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=algorithm, constraints={"valid_loss": bound})
    feasible = {row.number for row in study.trials if not row.violation}
    assert len(feasible) == 3
    assert study.best_trial.number in feasible
    assert study.best_trial.objective == max(row.objective for row in study.trials if row.number in feasible)
    listed = json.loads(said(study.directory, "trials", "--json"))
    assert [row["feasible"] for row in listed] == [True] * 3 + [False] * 3
    violations = [row["violation"] for row in listed]
    assert violations == sorted(violations)
    head = said(study.directory, "trials").splitlines()[0].split()
    assert "violation" in head
    assert f"valid_loss {bound[:4]}" in said(study.directory, "status")
    frame = study.dataframe().set_index("trial")
    assert {number for number, found in frame["violation"].items() if found == 0} == feasible
    assert "violation" not in plain.dataframe().columns
    theirs = study.to_optuna()
    assert theirs.best_trial.user_attrs["number"] == study.best_trial.number


def test_without_a_feasible_trial_the_least_violating_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tune(
        tasks.Blobs(), SPACE, tmp_path / "study", algorithm=shoal.Random(3, 1), constraints={"accuracy": ">= 2"}
    )
    least = max(study.trials, key=lambda row: (row.metrics["accuracy"], -row.number))
    words = rf"is feasible; trial {least.number} violates the constraints least, by {least.violation:.3g}$"
    with pytest.raises(ShoalError, match=words):
        _ = study.best_trial
    assert study.pareto == []
    with JournalView.read(study.directory) as journal:
        html = notebook_html(overview(journal, 0.0))
        monkeypatch.delattr(JournalView, "configurations")  # a snapshot reads one row of many
        found = snapshot(journal, 0.0)
    assert found.best is None
    assert f"none is feasible; trial {least.number} violates the constraints least" in best_text(found)
    assert "accuracy &gt;= 2" in html


def test_a_constraint_on_a_value_that_nobody_reports_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as error:
        tune(
            tasks.Blobs(), SPACE, tmp_path / "study", algorithm=shoal.Random(2, 2), constraints={"latency_ms": "<= 10"}
        )
    assert str(error.value).startswith(
        "the constraint 'latency_ms <= 10' is on a value that no trial has reported by epoch 2, the end of a budget; "
        "the task reports 'accuracy', 'valid_loss'. Name one of these in constraints="
    )
    with JournalView.read(tmp_path / "study") as journal:
        assert any(journal.curve(row.number) for row in journal.trials())


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"constraints": {"valid_loss": "< 1"}}, id="no bound"),
        pytest.param({"constraints": ["valid_loss <= 1"]}, id="a list"),
        pytest.param({"metric": ["accuracy", "valid_loss"], "mode": ["max"]}, id="too few modes"),
        pytest.param({"metric": ["accuracy", "valid_loss"], "mode": ["max", "min"], "target": 0.9}, id="one target"),
        pytest.param({**GOALS, "algorithm": shoal.Median(2, 1)}, id="an algorithm of one metric"),
        pytest.param(
            {"constraints": {"valid_loss": "<= 1"}, "algorithm": shoal.OptunaSearch(2, 1, "cmaes")}, id="cmaes"
        ),
    ],
)
def test_bad_input_is_refused_before_there_is_a_directory(arguments: dict[str, Any], tmp_path: Path) -> None:
    usual: dict[str, Any] = {"algorithm": shoal.Random(2, 1)}
    with pytest.raises(ShoalError):
        tune(tasks.Blobs(), {"lr": SPACE["lr"]}, tmp_path / "study", **{**usual, **arguments})
    assert not (tmp_path / "study").exists()


def test_the_target_is_reached_by_a_feasible_trial_only(tmp_path: Path) -> None:
    usual: dict[str, Any] = {"algorithm": shoal.Random(3, 2), "target": 0.0}
    for bound, ended in ((">= 2", False), (">= 0", True)):
        directory = tmp_path / str(ended)
        tune(tasks.Blobs(), SPACE, directory, constraints={"accuracy": bound}, **usual)
        with JournalView.read(directory) as journal:
            assert ("ended_because" in journal.study) is ended


def test_the_reference_of_the_hypervolume_is_fixed_and_printed(tmp_path: Path) -> None:
    algorithm = shoal.Random(12, 2)
    study = tune(
        tasks.Blobs(), SPACE, tmp_path / "study", algorithm=algorithm, metric=GOALS["metric"], mode=GOALS["mode"]
    )
    with JournalView.read(study.directory) as journal:
        fixed = journal.study["hypervolume_reference"]
    found = study.hypervolume()
    assert list(found.reference) == fixed
    volume = found.value
    assert volume > 0
    assert study.hypervolume(reference=(0.0, 10.0)).value > volume
    line = f"hypervolume {volume:.6g} within accuracy "
    assert line in said(study.directory, "best")
    assert line in said(study.directory, "status")
    assert json.loads(said(study.directory, "status", "--json"))["hypervolume"]["value"] == volume
    with pytest.raises(AlgorithmError, match=r"`reference` must be a finite value of each of the metrics"):
        study.hypervolume(reference=(0.0,))


def test_options_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("shoal.api._tune", lambda called, **arguments: given.update(arguments))
    file = tmp_path / "search.py"
    file.write_text(
        "import shoal\nshoal.tune(None, {}, metric='a', mode='min', algorithm=None, constraints={'a': '<= 1'})\n"
    )
    options = ["--constraint", "latency_ms <= 10", "--constraint", "fairness >= 0.8"]
    CliRunner().invoke(app, ["run", str(file), *options])
    assert given["constraints"] == {"latency_ms": "<= 10", "fairness": ">= 0.8"}
    for wrong, words in (
        ([*options, "--constraint", "fairness <= 1"], "a value has one bound"),
        (["--constraint", "x"], "must be"),
    ):
        done = CliRunner().invoke(app, ["run", str(file), *wrong])
        assert done.exit_code == 2
        assert words in " ".join(done.output.replace("│", " ").split())
