"""Studies with stop rules: what becomes of a trial that a rule ends, when the study ends, and what a kill changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tasks
from machine import JOB, Machine
from plain import tune
from test_engine import Stage, backend, walk_with_kills
from typer.testing import CliRunner

import shoal
from shoal.algorithms.base import Algorithm
from shoal.algorithms.rules import NoImprovement, Patience, Percentile, StopRule, Threshold
from shoal.algorithms.stop_rules import StopRules
from shoal.cli.app import app
from shoal.core.command import UpdateJob
from shoal.core.errors import ShoalError
from shoal.core.space import Space, grid
from shoal.core.trial import Report, TrialState
from shoal.journal.view import JournalView

COMPLETE, STOPPED = TrialState.COMPLETE, TrialState.STOPPED


def test_a_trial_that_a_rule_ends_leaves_its_job_and_its_later_reports_count_for_nothing() -> None:
    machine = Machine()
    state = machine.core.state
    state.config.algorithm = wrapped = StopRules(shoal.Grid(5), [Patience(1)])
    wrapped.bind(Space({"x": grid([1.0, 2.0, 3.0])}), metric="loss", mode="min", seed=0, data_seed=0)
    wrapped.next_groups(1)
    machine.report(2.0, Report(0, 2, {"loss": 2.0}))
    _, commands = machine.step(machine.reported(Report(0, 3, {"loss": 2.0}), Report(0, 4, {"loss": 0.0})), 2.1)
    assert [command.update.leave for command in commands if isinstance(command, UpdateJob)] == [frozenset({0})]
    assert state.trials[0].state is COMPLETE
    assert JOB in state.running
    machine.report(2.2, Report(0, 5, {"loss": 0.0}, state=TrialState.PAUSED))
    assert (state.trials[0].state, state.trials[0].epoch) == (COMPLETE, 4)


RULES: dict[str, Callable[[], Algorithm]] = {
    "hyperband": lambda: StopRules(shoal.Hyperband(9), [Patience(1, min_delta=0.1)]),
    "asha": lambda: StopRules(
        shoal.ASHA(9, max_epochs=9, concurrency=4), [Patience(1, min_delta=0.1), Threshold(above=0.9)]
    ),
    "random": lambda: StopRules(shoal.Random(9, epochs=5), [Percentile(50, startup=3)]),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_kills_at_random_change_nothing(
    make: Callable[[], Algorithm], turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, stage = Stage(tmp_path / "undisturbed", make), Stage(tmp_path / "study", make)
    undisturbed.run(backend())
    assert walk_with_kills(turn, lambda: stage.run(backend()), monkeypatch)
    assert stage.outcome() == undisturbed.outcome()
    states = [row[2] for row in stage.outcome()]
    assert states.count(COMPLETE) < len(states)


def of_losses(losses: Sequence[float], directory: Path, rule: NoImprovement, **settings: Any) -> Stage:
    """A study of trials of an epoch, each of which reports one of these losses, on a device for each of two trials."""
    space = Space({"x": grid([*losses])})
    return Stage(directory, lambda: shoal.Grid(1), space, settings={"stop_after": rule, "fuse": False, **settings})


@pytest.mark.parametrize(
    ("rule", "losses", "done", "reason"),
    [
        pytest.param(
            NoImprovement(2), [5, 6, 7, 1], 3, "the best loss has not improved for 2 trials, since trial 0", id="worse"
        ),
        pytest.param(NoImprovement(2), [5, 6, 4, 4.5], 4, None, id="improves in time"),
        pytest.param(
            NoImprovement(2, min_delta=2), [5, 4, 3.5, 1], 3,
            "the best loss has not improved for 2 trials, since trial 0", id="too little",
        ),
        pytest.param(NoImprovement(9), [5, 6, 7, 8], 4, None, id="fewer trials"),
    ],
)  # fmt: skip
def test_a_study_ends_when_its_best_value_does_not_improve(
    rule: NoImprovement, losses: list[float], done: int, reason: str | None, tmp_path: Path
) -> None:
    stage = of_losses([float(x) for x in losses], tmp_path / "study", rule)
    stage.run(backend())
    rows = stage.outcome()
    assert [row[2] for row in rows] == [COMPLETE] * done + [STOPPED] * (len(losses) - done)
    with JournalView.read(stage.directory) as journal:
        assert journal.study.get("ended_because") == reason
    stage.run(backend())
    assert stage.outcome() == rows, "a resume changes nothing"


def test_trials_count_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Trial 0 is the last to end: only then do the others, which were no better, end the study."""
    machine = Machine()
    state = machine.core.state
    tracker = type(state.improvement)(replace(state.config.spec, stop_after=NoImprovement(2)))
    machine.report(2.0, *(Report(x, 5, {"loss": 3.0}, state=TrialState.PAUSED) for x in (machine.second,)))
    assert tracker.stalled(state.trials) == ""
    machine.report(2.1, Report(machine.first, 5, {"loss": 3.0}, state=TrialState.PAUSED))
    assert tracker.stalled(state.trials) == ""
    machine.plan(2.2)
    state.trials.move(state.trials[machine.third], TrialState.FAILED, "as it is told")
    assert tracker.stalled(state.trials) == "the best loss has not improved for 2 trials, since trial 0"


def test_patience_in_a_real_study_and_its_resume(tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.001, 0.5, 1.0])}
    stop: list[StopRule] = [shoal.Patience(2)]
    study = tune(tasks.Blobs(), space, tmp_path / "study", algorithm=shoal.Grid(8), stop=stop)
    whole = tune(tasks.Blobs(), space, tmp_path / "whole", algorithm=shoal.Grid(8))
    with JournalView.read(whole.directory) as journal:
        curves: dict[int, list[float]] = {}
        for event in journal.events():
            if isinstance(event, Report):
                curves.setdefault(event.trial, []).append(event.metrics["accuracy"])
    for trial in study.trials:
        curve = curves[trial.number]
        best = [max(curve[: epoch + 1]) for epoch in range(len(curve))]
        flat = next((epoch for epoch in range(3, 8) if best[epoch - 1] == best[epoch - 3]), 8)
        assert (trial.state, trial.epoch) == (COMPLETE, flat)
        assert bool(trial.reason) is (flat < 8)
    assert min(trial.epoch for trial in study.trials) < 8
    with JournalView.read(study.directory) as journal:
        assert journal.spec.algorithm == "Grid(epochs=8) with Patience(epochs=2)"
        assert journal.spec.totals == shoal.algorithms.Totals(3, 3, 24)
    before = [(trial.number, trial.state, trial.epoch, trial.metrics) for trial in study.trials]
    again = shoal.resume(study.directory, show_progress=False)
    assert [(trial.number, trial.state, trial.epoch, trial.metrics) for trial in again.trials] == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"stop": shoal.Patience(3)}, "`stop` must be a list of rules", id="a rule alone"),
        pytest.param({"stop": [3]}, "`stop` must be a list of rules", id="a number"),
        pytest.param({"stop_after": 30}, "`stop_after` must be shoal.NoImprovement", id="trials alone"),
        pytest.param(
            {"stop_after": shoal.NoImprovement(3), "metric": ["a", "b"], "mode": ["min", "min"]},
            "`stop_after` needs one metric, and this study has 2",
            id="several metrics",
        ),
        pytest.param(
            {"stop": [shoal.Patience(3)], "algorithm": shoal.PBT(4, epochs=4)}, "does not go with PBT", id="PBT"
        ),
    ],
)
def test_what_is_refused_leaves_no_directory(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=words):
        tune(tasks.Blobs(), {"lr": shoal.uniform(0, 1)}, tmp_path / "study", **arguments)
    assert not (tmp_path / "study").exists()


SCRIPT = """
import shoal, tasks
shoal.tune(tasks.Blobs(), {"lr": 0.01}, metric="accuracy", mode="max", algorithm=shoal.Random(2, epochs=1),
           stop=[shoal.Percentile(50)], devices="cpu:1", backend="inline", show_progress=False)
"""


@pytest.mark.parametrize(
    ("options", "algorithm", "stop_after"),
    [
        pytest.param([], "Random(n=2, epochs=1) with Percentile(percentile=50)", None, id="the file's"),
        pytest.param(
            ["--patience", "3", "--stop-above", "5", "--stop-after", "7"],
            "Random(n=2, epochs=1) with Patience(epochs=3) and Threshold(above=5.0)",
            NoImprovement(7),
            id="the command's",
        ),
    ],
)
def test_options_of_the_command_line(
    options: list[str],
    algorithm: str,
    stop_after: NoImprovement | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(tasks.__file__).parent))
    (tmp_path / "search.py").write_text(SCRIPT)
    line = ["run", str(tmp_path / "search.py"), "--directory", str(tmp_path / "study"), *options]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    with JournalView.read(tmp_path / "study") as journal:
        assert (journal.spec.algorithm, journal.spec.stop_after) == (algorithm, stop_after)
