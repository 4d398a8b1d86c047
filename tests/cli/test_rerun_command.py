"""`shoal rerun` and `study.rerun`: a trial trained once more, alone."""

import json
import os
from pathlib import Path

import pytest
import torch
from finished import Noisy
from typer.testing import CliRunner, Result

import shoal
from shoal.cli.app import app
from shoal.core.errors import ShoalError


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def rerun(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rerun", *map(str, arguments)])


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and "sqlite-" not in path.name}


def test_a_trial_trained_again_is_what_was_recorded_and_its_study_stays_as_it_was(finished: shoal.Study) -> None:
    before, rows = content(finished.directory), finished.trials
    best = finished.best_trial
    assert best.epoch == 4
    again = finished.rerun(best.number)
    assert again.largest < 1e-9
    assert set(again.differences) == {"valid_loss"}
    assert sorted(again.found) == sorted(again.recorded) == [1, 2, 3, 4]
    assert again.found[4]["valid_loss"] == pytest.approx(best.metrics["valid_loss"], rel=1e-9)
    assert (content(finished.directory), finished.trials) == (before, rows)


def test_the_command_prints_a_line_for_each_metric(finished: shoal.Study) -> None:
    done = rerun(finished.directory, finished.best_trial.number, "--devices", "cpu:1")
    assert done.exit_code == 0
    head, row = done.stdout.splitlines()
    assert head.split() == ["metric", "differs", "epoch", "recorded", "rerun"]
    assert row.split()[0] == "valid_loss"
    assert float(row.split()[1]) < 1e-9
    assert "at every epoch" in done.stderr
    assert "4 epochs on cpu:0" in done.stderr


def test_a_task_that_was_changed_is_as_far_off_as_it_is(finished: shoal.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noisy, "scale", 2.0)
    shown = json.loads(rerun(finished.directory, finished.best_trial.number, "--json").stdout)
    assert shown["trial"] == finished.best_trial.number
    assert shown["largest"] == shown["metrics"]["valid_loss"]["relative"] > 0.3
    assert len(shown["metrics"]["valid_loss"]["recorded"]) == len(shown["metrics"]["valid_loss"]["found"]) == 4
    assert not shown["expected"]
    assert shown["verdict"][0].startswith("differs from the first epoch on: valid_loss by ")
    again, repeated, moved = (shown["metrics"]["valid_loss"][name] for name in ("found", "repeated", "perturbed"))
    assert again == repeated
    assert 0 < abs(moved[0] - again[0]) < 1e-9 * again[0]


def test_a_task_with_random_numbers_of_its_own_is_not_reproducible(
    finished: shoal.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noisy, "scale", property(lambda task: 1 + int.from_bytes(os.urandom(2), "big") / 65536))
    shown = json.loads(rerun(finished.directory, finished.best_trial.number, "--json").stdout)
    assert (shown["expected"], shown["irreproducible"]) == (None, ["valid_loss"])
    (line,) = shown["verdict"]
    assert line.startswith("this task is not reproducible: two equal reruns differ in valid_loss by ")
    assert not shown["metrics"]["valid_loss"]["perturbed"], "it is not trained a third time"


def test_a_loss_that_becomes_no_number_ends_it(finished: shoal.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noisy, "scale", float("nan"))
    done = rerun(finished.directory, finished.best_trial.number)
    assert done.exit_code == 0
    assert "ended after 1 of 4 epochs, as its loss was not a number" in done.stderr


def test_a_trial_that_is_not_there_is_refused(finished: shoal.Study) -> None:
    with pytest.raises(ShoalError, match="has no trial 99; its trials are 0-7"):
        finished.rerun(99)
    for refused in (rerun(finished.directory, 99), rerun(finished.directory, 0, "--devices", "cuda:77")):
        assert isinstance(refused.exception, ShoalError)
        assert refused.output == "", "it does not begin before it is refused"
    assert rerun(finished.directory, -1).exit_code == 2
