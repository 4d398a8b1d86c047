"""A study that compares trials by several metrics."""

import json
from pathlib import Path

import pytest
import tasks
from plain import tune
from typer.testing import CliRunner

import shoal
from shoal.algorithms import ALGORITHMS
from shoal.algorithms.base import Algorithm
from shoal.cli.app import app
from shoal.core import ranking
from shoal.core.errors import AlgorithmError, ShoalError, TaskError

SPACE = {"lr": shoal.loguniform(0.001, 0.3), "width": shoal.choice([6, 8])}
BOTH = {"metric": ("accuracy", "valid_loss"), "mode": ("max", "min")}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> shoal.Study:
    directory = tmp_path_factory.mktemp("several") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(directory.parent / "cache"))
        return tune(tasks.Blobs(), SPACE, directory, algorithm=shoal.OptunaSearch(12, epochs=2), **BOTH)


def dominated(row: object, rows: list[object]) -> bool:
    def pair(row: object) -> tuple[float, float]:
        return -row.metrics["accuracy"], row.metrics["valid_loss"]

    mine = pair(row)
    return any(pair(x) != mine and pair(x)[0] <= mine[0] and pair(x)[1] <= mine[1] for x in rows)


def test_the_pareto_are_those_that_nothing_dominates(study: shoal.Study) -> None:
    trials = study.trials
    assert len(trials) == 12
    best = study.pareto
    assert {row.number for row in best} == {row.number for row in trials if not dominated(row, trials)}
    assert best[0].metrics["accuracy"] == max(row.metrics["accuracy"] for row in trials)


def test_there_is_no_single_best(study: shoal.Study) -> None:
    for ask in (lambda: study.best_trial, study.best_model):
        with pytest.raises(ShoalError, match=r"compares trials by 2 metrics.*`pareto` are those"):
            ask()
    assert (study.metric, study.mode) == (("accuracy", "valid_loss"), ("max", "min"))


def test_with_one_metric_they_are_the_best_and_its_equals(tmp_path: Path) -> None:
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=shoal.OptunaSearch(4, epochs=1))
    assert study.pareto[0] == study.best_trial
    assert {row.objective for row in study.pareto} == {study.best_trial.objective}


def test_every_metric_has_its_best_value(study: shoal.Study) -> None:
    frame = study.dataframe()
    assert (frame["accuracy.best"] >= frame["accuracy"]).all()
    assert (frame["valid_loss.best"] <= frame["valid_loss"]).all()


def test_optuna_finds_the_same_front(study: shoal.Study) -> None:
    theirs = study.to_optuna()
    assert [direction.name for direction in theirs.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert theirs.user_attrs["metric"] == ["accuracy", "valid_loss"]
    assert {trial.user_attrs["number"] for trial in theirs.best_trials} == {row.number for row in study.pareto}


def test_what_the_command_line_says(study: shoal.Study) -> None:
    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app, [arguments[0], str(study.directory), *arguments[1:]])
        assert done.exit_code == 0, done.output
        return done.stdout

    numbers = [row.number for row in study.pareto]
    trials = json.loads(said("trials", "--json"))
    assert [row["trial"] for row in trials if row["front"]] == [row["trial"] for row in trials][: len(numbers)]
    assert sorted(row["trial"] for row in trials if row["front"]) == sorted(numbers)
    assert [row["trial"] for row in json.loads(said("best", "--json"))] == numbers
    status = json.loads(said("status", "--json"))
    assert status["metric"] == ["accuracy", "valid_loss"]
    assert status["mode"] == ["max", "min"]
    assert status["best"] is None
    assert [best["trial"] for best in status["front"]] == numbers
    assert status["front"][0]["value"] == [study.pareto[0].ranked[name] for name in study.metric]
    head, *lines = said("trials").splitlines()
    titles = ["trial", "state", "front", "accuracy", "last", "valid_loss", "last", "at", "epochs", "seconds", "config"]
    assert head.split() == titles
    rows = lines[: len(study.trials)]
    assert [line.split()[2] == "*" for line in rows] == [True] * len(numbers) + [False] * (12 - len(numbers))
    assert said("best").count("config.lr") == len(numbers)
    assert f"(trial {numbers[0]}, epoch " in said("status")


@pytest.mark.parametrize(
    "arguments", [["trials"], ["trials", "--json"], ["trials", "--limit", "2"], ["best"], ["status"]]
)
def test_the_front_is_found_once(study: shoal.Study, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    find = ranking.pareto_front
    monkeypatch.setattr(ranking, "pareto_front", lambda losses: (asked.append(len(losses)), find(losses))[1])
    done = CliRunner().invoke(app, [arguments[0], str(study.directory), *arguments[1:]])
    assert done.exit_code == 0, done.output
    assert asked == [12]


@pytest.mark.parametrize("algorithm", [shoal.BOHB(3), shoal.Median(2, 1)], ids=lambda each: type(each).__name__)
def test_two_algorithms_refuse_several(algorithm: Algorithm, tmp_path: Path) -> None:
    with pytest.raises(AlgorithmError) as error:
        tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=algorithm, **BOTH)
    assert str(error.value) == (
        f"{type(algorithm).__name__} compares trials by one metric, got ['accuracy', 'valid_loss']; "
        "for several use ASHA, SuccessiveHalving, Hyperband, PBT, OptunaSearch, Random or Grid"
    )
    assert not (tmp_path / "study").exists()


def test_all_others_take_several() -> None:
    refusing = [name for name, kind in ALGORITHMS.items() if not kind.takes_several_metrics]
    assert refusing == ["bohb", "sync_bohb", "median"]


def test_a_second_metric_that_is_not_reported_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="metric 'latency' is not reported by the task; it reports 'accuracy'"):
        tune(
            tasks.Blobs(),
            SPACE,
            tmp_path / "study",
            algorithm=shoal.OptunaSearch(2, epochs=1),
            metric=["accuracy", "latency"],
            mode=["max", "min"],
        )


def test_a_list_of_one_is_one(tmp_path: Path) -> None:
    algorithm = shoal.Random(2, epochs=1)
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=algorithm, metric=["accuracy"], mode=["max"])
    assert (study.metric, study.mode) == ("accuracy", "max")
    assert study.best_trial in study.trials


def test_a_study_of_several_metrics_goes_on(tmp_path: Path) -> None:
    """The algorithm is brought to where it was by what the journal holds."""
    whole = tune(
        tasks.Blobs(), SPACE, tmp_path / "study", algorithm=shoal.OptunaSearch(14, 1, "tpe", concurrency=2), **BOTH
    )
    again = shoal.resume(whole.directory, show_progress=False)
    assert [row.config for row in again.trials] == [row.config for row in whole.trials]
