"""`objective` and `target` of a study: what they change, what is refused, and what a resume keeps."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import tune
from test_engine import Scripted, Stage, backend, well
from typer.testing import CliRunner

import shoal
from shoal.algorithms.grid import Grid
from shoal.cli.app import app
from shoal.core.errors import PolicyError, StudyInterrupted
from shoal.core.event import Event, Reported
from shoal.core.job import Job, Purpose
from shoal.core.space import Space, grid
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.plan.schedule.auto import Auto
from shoal.plan.schedule.registry import check_objective_of_study

SPACE = {"lr": shoal.choice([0.001, 0.01, 0.1])}


@pytest.mark.parametrize(
    ("policy", "objective", "target", "metrics", "words"),
    [
        pytest.param("auto", "makspan", None, 1, "must be one of makespan, .*got 'makspan'", id="no such objective"),
        pytest.param("fifo", "makespan", None, 1, "policy 'fifo'; leave `objective` out", id="another policy"),
        pytest.param(Auto(), "makespan", None, 1, r"Auto\(objective=...\)", id="a policy object"),
        pytest.param("auto", "time_to_target", None, 1, "needs a target.*--target", id="no target"),
        pytest.param("auto", None, float("nan"), 1, "finite number, got nan", id="target NaN"),
        pytest.param("auto", None, True, 1, "finite number, got True", id="target True"),
        pytest.param("auto", None, "0.9", 1, "finite number, got '0.9'", id="target text"),
        pytest.param("auto", None, 0.9, 2, "one metric, and this study has 2", id="several metrics"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    policy: Any, objective: str | None, target: Any, metrics: int, words: str
) -> None:
    with pytest.raises(PolicyError, match=words):
        check_objective_of_study(policy, objective, target, metrics)


@pytest.mark.parametrize(
    ("policy", "objective", "target"),
    [("fifo", None, None), ("fifo", None, 0.9), ("auto", "makespan", 0.9), ("auto", "time_to_target", 1)],
)
def test_what_fits_together(policy: str, objective: str | None, target: float | None) -> None:
    assert check_objective_of_study(policy, objective, target, 1) is None


def test_a_refused_objective_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="needs a target"):
        tune(tasks.Blobs(), SPACE, tmp_path / "study", objective="time_to_target")
    assert not (tmp_path / "study").exists()


def test_a_study_ends_when_a_trial_reaches_the_target(tmp_path: Path) -> None:
    whole = tune(tasks.Blobs(), SPACE, tmp_path / "whole", fuse=False)
    first = min(whole.trials, key=lambda trial: trial.number)
    study = tune(
        tasks.Blobs(), SPACE, tmp_path / "study", fuse=False, objective="time_to_target", target=first.objective
    )
    reached = next(trial for trial in study.trials if trial.epoch and trial.objective >= first.objective)
    others = [trial for trial in study.trials if trial.number != reached.number]
    assert {trial.state for trial in others if trial.epoch < 4} == {TrialState.STOPPED}
    assert {trial.reason for trial in others if trial.epoch < 4} == {
        f"trial {reached.number} reached the target of the study"
    }
    assert sum(trial.epoch for trial in study.trials) < sum(trial.epoch for trial in whole.trials)
    before = [(trial.number, trial.state, trial.epoch) for trial in study.trials]
    again = shoal.resume(study.directory, show_progress=False)
    assert [(trial.number, trial.state, trial.epoch) for trial in again.trials] == before


def test_a_target_that_no_trial_reaches_changes_nothing(tmp_path: Path) -> None:
    whole = tune(tasks.Blobs(), SPACE, tmp_path / "whole", fuse=False)
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study", fuse=False, target=2.0)
    assert [(x.state, x.epoch, x.metrics) for x in study.trials] == [
        (x.state, x.epoch, x.metrics) for x in whole.trials
    ]


@pytest.mark.parametrize(
    "metrics", [{"other": 0.0}, {"loss": 0.0, "other": "text"}], ids=["without the metric", "with an invalid metric"]
)
def test_a_trial_that_fails_with_its_report_does_not_reach_the_target(tmp_path: Path, metrics: dict[str, Any]) -> None:
    def second_report_fails(job: Job) -> list[Event]:
        def said(event: Event) -> Event:
            if not isinstance(event, Reported) or (event.reports[0].trial, event.reports[0].epoch) != (0, 2):
                return event
            return replace(event, reports=(replace(event.reports[0], metrics=metrics),))

        return [said(event) for event in well(job)]

    stage = Stage(tmp_path / "study", lambda: Grid(2), Space({"x": grid([1.0, 2.0])}), settings={"target": 0.1})
    stage.run(backend(second_report_fails))
    assert [row[2] for row in stage.outcome()] == [TrialState.FAILED, TrialState.COMPLETE]


def test_a_target_that_is_reached_while_the_study_stops_ends_it_when_it_is_resumed(tmp_path: Path) -> None:
    class LastWord(Scripted):
        def stop(self, job: str) -> None:
            next_report = self._events[job][0]
            super().stop(job)
            self._events[job].insert(0, next_report)

    stage = Stage(tmp_path / "study", lambda: Grid(2), Space({"x": grid([1.0, 2.0])}), settings={"target": 0.5})
    with closing(stage.open()) as journal:
        engine = stage.engine(
            journal, LastWord(well, False, lambda job: engine.interrupt() if job.purpose is Purpose.TRAIN else None)
        )
        engine.begin()
        with pytest.raises(StudyInterrupted):
            engine.run()
        assert "ended_because" not in journal.study
    assert [row[3] for row in stage.outcome()] == [2, 0]
    stage.run(backend())
    assert [(row[2], row[3]) for row in stage.outcome()] == [(TrialState.COMPLETE, 2), (TrialState.STOPPED, 0)]
    with closing(stage.open()) as journal:
        assert journal.study["ended_because"] == "trial 0 reached the target of the study"


SCRIPT = """
import shoal, tasks
shoal.tune(tasks.Blobs(), {"lr": 0.01}, metric="accuracy", mode="max", algorithm=shoal.Random(2, epochs=1),
           devices="cpu:1", backend="inline")
"""


def test_options_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(tasks.__file__).parent))
    (tmp_path / "search.py").write_text(SCRIPT)
    options = ["--objective", "time_to_good", "--target", "0.99", "--directory", str(tmp_path / "study")]
    done = CliRunner().invoke(app, ["run", str(tmp_path / "search.py"), *options])
    assert done.exit_code == 0, done.output
    with JournalView.read(tmp_path / "study") as journal:
        assert (journal.spec.objective, journal.spec.target) == ("time_to_good", 0.99)
    refused = CliRunner().invoke(app, ["run", str(tmp_path / "search.py"), "--objective", "time_to_target"])
    assert refused.exit_code == 1
    assert "needs a target" in str(refused.exception or refused.output)


@pytest.mark.parametrize(
    ("options", "objective"),
    [
        pytest.param((), "time_to_good", id="nothing"),
        pytest.param(("--policy", "auto"), "time_to_good", id="auto again"),
        pytest.param(("--policy", "fifo"), "makespan", id="another policy"),
        pytest.param(("--policy", "fifo", "--objective", "time_to_good"), None, id="another policy with an objective"),
    ],
)
def test_another_policy_on_the_command_line_drops_the_objective_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], objective: str | None
) -> None:
    monkeypatch.syspath_prepend(str(Path(tasks.__file__).parent))
    (tmp_path / "search.py").write_text(SCRIPT.replace('mode="max"', 'mode="max", objective="time_to_good"'))
    directory = str(tmp_path / "study")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "search.py"), "--directory", directory, *options])
    if objective is None:
        assert "leave `objective` out" in str(done.exception or done.output)
        return
    assert done.exit_code == 0, done.output
    with JournalView.read(directory) as journal:
        assert journal.spec.objective == objective
