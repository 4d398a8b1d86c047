"""Studies that begin with the trials of earlier ones: what is copied, and what is refused."""

import json
import logging
import math
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from finished import Noisy
from plain import table, tune
from typer.testing import CliRunner

import shoal
from shoal.algorithms.base import Algorithm
from shoal.api import resume
from shoal.cli.app import app
from shoal.core.errors import JournalError, ShoalError
from shoal.core.space import Space
from shoal.core.trial import TrialState
from shoal.journal.earlier import earlier_trials
from shoal.journal.view import JournalView
from shoal.look.snapshot import snapshot
from shoal.spec import StudySpec

SPACE = {"lr": shoal.loguniform(1e-3, 1e-1)}
BUDGETS = (1, 2, 4)


@pytest.fixture
def source(finished_study: Path, tmp_path: Path) -> shoal.Study:
    """An earlier study: eight trials of successive halving at 1, 2 and 4 epochs."""
    return shoal.Study(shutil.copytree(finished_study, tmp_path / "study"))


def spec(space: Any = SPACE, **fields: Any) -> StudySpec:
    space = space if isinstance(space, Space) else Space(space)
    return StudySpec(**{"metric": "valid_loss", "mode": "min", "space": space.to_json()} | fields)


def warm(directory: Path, sources: list[Path], **arguments: Any) -> shoal.Study:
    usual = {"metric": "valid_loss", "mode": "min", "algorithm": shoal.OptunaSearch(3, epochs=1, concurrency=1)}
    return tune(Noisy(), SPACE, directory, **(usual | {"warm_start": sources} | arguments))


def test_the_values_at_the_budgets_are_copied(source: shoal.Study) -> None:
    (trials, (line,)) = earlier_trials([source.directory], spec(), (1, 4, 9))
    assert line == f"8 of 8 trials of {source.directory}"
    assert [trial.config for trial in trials] == [row.config for row in source.trials]
    assert [trial.stopped for trial in trials] == [row.state is TrialState.STOPPED for row in source.trials]
    with JournalView.read(source.directory) as journal:
        for trial, row in zip(trials, source.trials, strict=True):
            curve = {each.epoch: each.metrics["valid_loss"] for each in journal.curve(row.number)}
            assert trial.metrics == {x: {"valid_loss": curve[x]} for x in (1, 4) if x in curve}
    kept = json.loads(json.dumps(replace(spec(), earlier=trials).to_json()))
    assert StudySpec.from_json(kept).earlier == trials


@pytest.mark.parametrize(
    ("algorithm", "rank_by", "expected"),
    [
        pytest.param(shoal.OptunaSearch(1, epochs=4), "best", {4: -1.0}, id="the best epoch until then"),
        pytest.param(shoal.OptunaSearch(1, epochs=4), "last", {4: 0.5}, id="the last"),
        pytest.param(shoal.SyncBOHB(4, eta=2, brackets=1), "best", {1: 0.7, 2: -1.0, 4: 0.5}, id="that of each budget"),
    ],
)
def test_they_have_the_values_that_the_algorithm_takes_of_its_own_trials(
    algorithm: Algorithm, rank_by: str, expected: dict[int, float], source: shoal.Study, tmp_path: Path
) -> None:
    number = next(row.number for row in source.trials if row.epoch == 4)
    with sqlite3.connect(source.directory / "journal.sqlite") as journal:
        for epoch, loss in {1: 0.7, 2: -1.0, 3: 0.6, 4: 0.5}.items():
            values = (json.dumps({"valid_loss": loss}), number, epoch)
            journal.execute("UPDATE reports SET metrics = ? WHERE trial = ? AND epoch = ?", values)
    study = warm(tmp_path / "warm", [source.directory], algorithm=algorithm, rank_by=rank_by)
    with JournalView.read(study.directory) as view:
        (own,) = [each for each in view.spec.earlier if each.config == source.trials[number].config]
    assert own.metrics == {epoch: {"valid_loss": loss} for epoch, loss in expected.items()}


def greater(study: shoal.Study, bound: float) -> int:
    return sum(row.config["lr"] > bound for row in study.trials)


SPACES: dict[str, tuple[Callable[[], Any], Callable[[shoal.Study], tuple[int, str]]]] = {
    "a narrower one": (
        lambda: {"lr": shoal.loguniform(1e-3, 0.02)},
        lambda study: (8 - greater(study, 0.02), f"{greater(study, 0.02)} with `lr` > 0.02"),
    ),
    "a higher one": (
        lambda: {"lr": shoal.uniform(0.02, 1)},
        lambda study: (greater(study, 0.02), f"{8 - greater(study, 0.02)} with `lr` < 0.02"),
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_what_is_not_in_the_space_is_counted(name: str, source: shoal.Study) -> None:
    space, expected = SPACES[name]
    trials, (line,) = earlier_trials([source.directory], spec(space()), BUDGETS)
    used, reason = expected(source)
    assert 0 < used < 8
    assert (len(trials), line) == (used, f"{used} of 8 trials of {source.directory}; {reason}")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a missing parameter": ({"space": SPACE | {"momentum": shoal.uniform(0, 1)}}, "8 without `momentum`; leave"),
    "a further parameter": ({"space": {}}, "none of the 8 trials of .*: 8 with `lr`, which the space lacks"),
    "another option": ({"space": {"lr": shoal.choice([0.5, 0.6])}}, r"1 `lr` is 0\.\d+, and the space has choice"),
    "another metric": ({"metric": "accuracy"}, r"by valid_loss \(min\), and this one by accuracy \(min\)"),
    "another mode": ({"mode": "max"}, r"by valid_loss \(min\), and this one by valid_loss \(max\)"),
    "a further metric": ({"metric": ["valid_loss", "f1"], "mode": ["min", "max"]}, r"valid_loss \(min\), f1 \(max\)"),
    "an unreported constraint": ({"constraints": {"ms": "<= 1"}}, "8 without valid_loss and ms at epoch 1, 2, 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_study_without_a_usable_trial_is_refused(name: str, source: shoal.Study) -> None:
    fields, words = REFUSED[name]
    with pytest.raises(ShoalError, match=words):
        earlier_trials([source.directory], spec(**fields), BUDGETS)


def test_trials_without_the_metric_of_the_best_epoch_are_refused(source: shoal.Study) -> None:
    fields = spec(best_by={"f1": "max"})
    with sqlite3.connect(source.directory / "journal.sqlite") as journal:
        metrics = json.dumps({"valid_loss": 0.1, "f1": math.nan})
        journal.execute("UPDATE reports SET metrics = ? WHERE trial = 0", (metrics,))
    with pytest.raises(ShoalError, match="8 without valid_loss and f1 at epoch 1, 2, 4"):
        earlier_trials([source.directory], fields, BUDGETS, fields.of_best)


def test_an_epoch_without_the_metric_of_the_best_epoch_is_not_the_best(source: shoal.Study) -> None:
    number = next(row.number for row in source.trials if row.epoch == 4)
    with sqlite3.connect(source.directory / "journal.sqlite") as journal:
        for epoch, metrics in {2: {"valid_loss": 0.7, "f1": 0.5}, 4: {"valid_loss": 0.1}}.items():
            values = (json.dumps(metrics), number, epoch)
            journal.execute("UPDATE reports SET metrics = ? WHERE trial = ? AND epoch = ?", values)
    fields = spec(best_by={"f1": "max"})
    (trial,), _ = earlier_trials([source.directory], fields, BUDGETS, fields.of_best)
    assert trial.metrics == {2: {"valid_loss": 0.7}, 4: {"valid_loss": 0.7}}


def test_epochs_without_values_are_refused(source: shoal.Study) -> None:
    with pytest.raises(ShoalError, match="8 without valid_loss at epoch 9; leave the study out"):
        earlier_trials([source.directory], spec(), (9,))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        pytest.param("runs/a", ShoalError, "`warm_start` must be a list of directories", id="one text"),
        pytest.param([3], ShoalError, "`directory` must be the path", id="a number"),
        pytest.param(["nowhere"], JournalError, "there is no study in .*nowhere", id="no study"),
    ],
)
def test_other_arguments_are_refused_before_there_is_a_directory(
    given: Any, error: type[ShoalError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        warm(tmp_path / "new", given)
    assert not (tmp_path / "new").exists()


def test_a_study_named_twice_is_refused(source: shoal.Study) -> None:
    with pytest.raises(ShoalError, match="twice; name each study once"):
        earlier_trials([source.directory, str(source.directory)], spec(), BUDGETS)


def test_trials_that_failed_or_are_open_or_copies_do_not_count(source: shoal.Study) -> None:
    with sqlite3.connect(source.directory / "journal.sqlite") as journal:
        journal.execute("UPDATE trials SET state = 'failed' WHERE number = 0")
        journal.execute("UPDATE trials SET state = 'paused' WHERE number IN (1, 2)")
        journal.execute("UPDATE trials SET origin = 0, start = 1 WHERE number IN (3, 4, 5)")
    trials, (line,) = earlier_trials([source.directory], spec(), BUDGETS)
    assert [trial.config for trial in trials] == [row.config for row in source.trials[6:]]
    assert line.endswith("; 3 begun with the weights of another, 2 not finished, 1 failed")


def test_the_source_may_be_deleted_and_the_trials_are_no_trials(
    source: shoal.Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = warm(tmp_path / "warm", [source.directory], show_progress=True)
    assert f"warm start: 8 of 8 trials of {source.directory}" in capsys.readouterr().err
    with JournalView.read(study.directory) as journal:
        assert snapshot(journal, 0.0).earlier_from == (f"8 of 8 trials of {source.directory}",)
    before = table(study)
    assert [row.number for row in study.trials] == [0, 1, 2]
    shutil.rmtree(source.directory)
    resume(study.directory, trials=5, show_progress=False)  # replays the proposals, and proposes further ones
    assert table(study)[:3] == before
    assert [row.state for row in study.trials] == [TrialState.COMPLETE] * 5
    assert [row.config for row in study.trials] != [
        row.config for row in warm(tmp_path / "cold", [], algorithm=shoal.OptunaSearch(5, epochs=1)).trials
    ]


def test_without_a_model_it_is_said_and_the_best_are_offered(
    source: shoal.Study, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shoal.study"):
        study = warm(tmp_path / "warm", [source.directory], algorithm=shoal.Random(2, epochs=1))
    (said,) = [each.getMessage() for each in caplog.records if "warm_start" in each.getMessage()]
    assert said.startswith("`warm_start` has no effect on Random(n=2, epochs=1)")
    assert f'initial=shoal.Study("{source.directory}").top(5)' in said
    with JournalView.read(study.directory) as journal:
        assert (journal.spec.earlier, journal.spec.earlier_from) == ([], [])
    best = source.top(2)
    again = warm(tmp_path / "best", [], algorithm=shoal.Random(2, epochs=1), initial=best)
    assert [row.config for row in again.trials] == best


def test_configurations_with_repeats_count_by_their_aggregates(tmp_path: Path) -> None:
    space, grid = {"lr": shoal.grid([0.01, 0.03])}, shoal.Grid(1)
    goals: dict[str, Any] = {"metric": "valid_loss", "mode": "min", "repeats": 2}
    study = tune(Noisy(), space, tmp_path / "repeats", algorithm=grid, folds=2, **goals)
    trials, (line,) = earlier_trials([study.directory], spec(), (1,))
    assert line == f"2 of 2 configurations of {study.directory}"
    assert [(trial.config, trial.metrics[1]["valid_loss"]) for trial in trials] == [
        ({"lr": row.config["lr"]}, row.metrics["valid_loss"]) for row in study.configurations
    ]
    search = shoal.SyncBOHB(max_epochs=3, eta=3, brackets=1)
    assert len(warm(tmp_path / "warm", [study.directory], algorithm=search, repeats=2).configurations) == 3


def test_the_best_configurations(source: shoal.Study) -> None:
    with JournalView.read(source.directory) as journal:
        ranking = sorted(journal.trials(), key=lambda row: (row.objective is None, row.objective))
    assert source.top(3) == [row.config for row in ranking[:3]]
    assert source.top(99) == [row.config for row in ranking]
    with pytest.raises(ShoalError, match="`k` must be an integer of at least 1, got 0"):
        source.top(0)


def test_the_option_of_the_command_line(source: shoal.Study, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from test_warm_start import *\nwarm(None, [])\n")
    other = Path(shutil.copytree(source.directory, tmp_path / "other"))
    options = [word for each in (source.directory, other) for word in ("--warm-start", str(each))]
    options += ["--directory", str(tmp_path / "new")]
    done = CliRunner().invoke(app, ["run", str(script), *options])
    assert done.exit_code == 0, done.output
    with JournalView.read(tmp_path / "new") as journal:
        assert len(journal.spec.earlier) == 16
        assert journal.spec.earlier_from == [f"8 of 8 trials of {each}" for each in (source.directory, other)]
