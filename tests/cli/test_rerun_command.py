"""`shoal rerun` and `study.rerun`: a trial trained once more, alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

import shoal
from shoal.cli.app import app
from shoal.core.errors import ShoalError

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Noisy(shoal.Task):
    """With dropout, in float64; `scale` stands for an edit of the task."""

    scale = 1.0

    def data(self, config: Any) -> Any:
        return TensorDataset(X[:30], X[:30].sum(1)), TensorDataset(X[30:], X[30:].sum(1))

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.scale * F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    def batch_size(self, config: Any) -> int:
        return 8


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shoal.Study]:
    directory = tmp_path_factory.mktemp("rerun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(directory / "cache"))
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        yield shoal.tune(
            Noisy(),
            {"lr": shoal.loguniform(1e-3, 1e-1)},
            metric="valid_loss",
            mode="min",
            algorithm=shoal.Hyperband(max_epochs=4, eta=2, brackets=1),
            directory=directory / "study",
            backend="inline",
            devices="cpu:1",
            show_progress=False,
        )


def rerun(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rerun", *map(str, arguments)])


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and "sqlite-" not in path.name}


def test_a_trial_trained_again_is_what_was_recorded_and_its_study_stays_as_it_was(study: shoal.Study) -> None:
    before, rows = content(study.directory), study.trials
    best = study.best_trial
    assert best.epoch == 4
    again = study.rerun(best.number)
    assert again.largest < 1e-9
    assert set(again.differences) == {"valid_loss"}
    assert sorted(again.found) == sorted(again.recorded) == [1, 2, 3, 4]
    assert again.found[4]["valid_loss"] == pytest.approx(best.metrics["valid_loss"], rel=1e-9)
    assert (content(study.directory), study.trials) == (before, rows)


def test_the_command_prints_a_line_for_each_metric(study: shoal.Study) -> None:
    done = rerun(study.directory, study.best_trial.number, "--devices", "cpu:1")
    assert done.exit_code == 0
    head, row = done.stdout.splitlines()
    assert head.split() == [
        "metric",
        "largest",
        "relative",
        "difference",
        "at",
        "epoch",
        "recorded",
        "trained",
        "again",
    ]
    assert row.split()[0] == "valid_loss"
    assert float(row.split()[1]) < 1e-9
    assert "4 epochs on cpu:0" in done.stderr


def test_a_task_that_was_changed_is_as_far_off_as_it_is(study: shoal.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noisy, "scale", 2.0)
    shown = json.loads(rerun(study.directory, study.best_trial.number, "--json").stdout)
    assert shown["trial"] == study.best_trial.number
    assert shown["largest"] == shown["metrics"]["valid_loss"]["relative"] > 0.3
    assert len(shown["metrics"]["valid_loss"]["recorded"]) == len(shown["metrics"]["valid_loss"]["found"]) == 4


def test_a_loss_that_becomes_no_number_ends_it(study: shoal.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noisy, "scale", float("nan"))
    done = rerun(study.directory, study.best_trial.number)
    assert done.exit_code == 0
    assert "ended after 1 of 4 epochs, as its loss was not a number" in done.stderr


def test_a_trial_that_is_not_there_is_refused(study: shoal.Study) -> None:
    with pytest.raises(ShoalError, match="has no trial 99; it has 4, numbered from 0"):
        study.rerun(99)
    for refused in (rerun(study.directory, 99), rerun(study.directory, 0, "--devices", "cuda:77")):
        assert isinstance(refused.exception, ShoalError)
        assert refused.output == "", "it does not begin before it is refused"
    assert rerun(study.directory, -1).exit_code == 2
