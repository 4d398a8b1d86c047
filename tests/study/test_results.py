"""Results of a study, and profiles that later studies use."""

import json
import math
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from plain import RELATIVE, curves, jobs, plain_loop, tune
from torch.utils.data import default_collate
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.core.errors import CheckpointError, ShoalError, StudyFailedError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.run.base import Backend
from shoal.train.data.loader import epoch_order

RATES = {"lr": shoal.grid([0.003, 0.01, 0.03])}
SGD = {"lr": shoal.grid([0.01, 0.03]), "momentum": 0.9, "step_size": 2}


def test_every_job_of_a_study_that_is_over_has_ended(finished: shoal.Study) -> None:
    assert {(job.outcome, job.ended is None) for job in jobs(finished.directory)} == {("finished", False)}


def test_the_best_model_is_the_one_that_was_reported(tmp_path: Path) -> None:
    space = {"lr": shoal.loguniform(0.003, 0.3), "width": shoal.choice([6, 8])}
    arguments: dict[str, Any] = {"metric": "valid_loss", "mode": "min"}
    study = tune(tasks.Blobs(), space, tmp_path / "study", algorithm=shoal.Random(4, epochs=2), **arguments)
    model, best = study.best_model(), study.best_trial
    assert not model.training
    batch = tasks.Blobs().data(best.config)[1][:]
    assert tasks.Blobs().loss(model, batch).item() == pytest.approx(best.ranked["valid_loss"], rel=RELATIVE)
    assert tasks.Blobs().metrics(model, batch)["accuracy"].item() == pytest.approx(best.ranked["accuracy"])
    assert best.objective == min(row.objective for row in study.trials if row.objective is not None)


def test_looking_at_the_best_model_draws_no_random_numbers(finished: shoal.Study) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    finished.best_model()
    assert torch.equal(torch.rand(3), expected)


def test_without_a_checkpoint_there_is_no_best_model(finished: shoal.Study) -> None:
    for file in (finished.directory / "checkpoints").rglob("*.pt"):
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="has no intact checkpoint"):
        finished.best_model()


def test_without_a_number_there_is_no_best_trial(tmp_path: Path) -> None:
    with pytest.raises(StudyFailedError, match="loss is not finite at step 2 of epoch 1"):
        tune(tasks.Blobs(), {"lr": 1e300}, tmp_path / "study")
    with pytest.raises(ShoalError, match=r"no trial of the study .* has a value of 'accuracy'"):
        shoal.Study(tmp_path / "study").best_trial  # noqa: B018


def test_the_data_frame_has_a_row_a_trial(tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.01, 1e300]), "nested": {"depth": 2}}
    study = tune(tasks.Blobs(), space, tmp_path / "study")
    frame = study.dataframe()
    assert list(frame.columns) == [
        "trial", "state", "config.lr", "config.nested.depth", "valid_loss", "valid_loss.best", "accuracy",
        "accuracy.best", "best_epoch", "epochs", "seconds", "device", "job", "proof", "reason",
    ]  # fmt: skip
    assert list(frame["trial"]) == [0, 1]
    assert list(frame["state"]) == ["complete", "failed"]
    assert list(frame["epochs"]) == [4, 1]
    assert list(frame["device"]) == ["cpu:0"] * 2
    assert list(frame["config.nested.depth"]) == [2, 2]
    curve = curves(study.directory)[0]
    assert frame["valid_loss"][0] == curve[4]["valid_loss"]
    assert frame["valid_loss.best"][0] == min(metrics["valid_loss"] for metrics in curve.values())
    assert math.isnan(frame["valid_loss.best"][1])
    assert frame["reason"][1] == "loss is not finite at step 2 of epoch 1"
    assert (frame["seconds"] > 0).all()


def test_the_grid_has_a_cell_for_each_place_that_was_tried(tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.01, 1e300]), "width": shoal.grid([6, 8]), "depth": 2}
    study = tune(tasks.Blobs(), space, tmp_path / "study")
    grid = study.grid()
    assert [axis.name for axis in grid.axes] == ["lr", "width"]
    assert {position: cell.trials for position, cell in grid.cells.items()} == dict.fromkeys(
        [(0, 0), (0, 1), (1, 0), (1, 1)], 1
    )
    fine, failed = grid.project("lr").cells.values()
    assert (fine.best, fine.states) == (study.best_trial.objective, {TrialState.COMPLETE: 2})
    assert (failed.best, failed.states) == (None, {TrialState.FAILED: 2})


@pytest.mark.parametrize(
    ("task", "space"),
    [
        pytest.param(tasks.Momentum(), SGD, id="momentum"),
        pytest.param(tasks.Blobs(), RATES, id="adam", marks=pytest.mark.thorough),
        pytest.param(tasks.RmsProp(), RATES, id="an optimizer without a rule", marks=pytest.mark.thorough),
        pytest.param(tasks.Convolutional(), RATES, id="BatchNorm"),
    ],
)
def test_a_checkpoint_is_the_users_own_and_goes_on_in_plain_pytorch(
    task: shoal.Task, space: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs in a study, two more by hand: four of a plain loop."""
    monkeypatch.setattr(Backend, "delete_checkpoints", lambda *command, weights: None)  # of trials that have ended
    study = tune(task, space, tmp_path / "study", algorithm=shoal.Grid(epochs=2))
    for row in study.trials:
        folder = study.directory / "checkpoints" / f"{row.number:06d}"
        content = torch.load(max(folder.glob("*.pt")), weights_only=True)
        state = torch.load(max(folder.glob("*.state")), weights_only=True)
        assert (content["trial"], content["epoch"], content["step"]) == (row.number, 2, 0)
        model = task.model(row.config)
        optimizer = task.optimizer(model, row.config)
        scheduler = task.scheduler(optimizer, row.config)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(state["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
        train, valid = task.data(row.config)
        for epoch in (2, 3):
            model.train()
            for part in epoch_order(len(train), row.trial.data_seed, epoch).split(16):
                optimizer.zero_grad()
                task.loss(model, default_collate([train[int(i)] for i in part])).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
        model.eval()
        loss = task.loss(model, valid[:]).item()
        assert loss == pytest.approx(plain_loop(task, row.trial, 4)[4]["valid_loss"], rel=RELATIVE)


def test_a_checkpoint_holds_no_more_than_its_trial(tmp_path: Path) -> None:
    """The weights of a member are views of the whole array's."""
    study = tune(tasks.Digits(), {"lr": shoal.grid([0.001] * 1 + [0.002, 0.003])}, tmp_path / "study",
                 algorithm=shoal.Grid(1))  # fmt: skip
    weights = sum(parameter.nbytes for parameter in tasks.Digits().model({}).parameters())
    for file in (study.directory / "checkpoints").rglob("0*-*"):
        assert file.stat().st_size < 3 * weights + 50_000


def test_a_study_that_has_ended_is_resumed_without_work(finished: shoal.Study) -> None:
    before, count = finished.trials, len(jobs(finished.directory))
    assert shoal.resume(finished.directory, show_progress=False).trials == before
    assert len(jobs(finished.directory)) == count


def test_an_interrupted_study_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    task = tasks.InterruptedAfter(20, str(tmp_path / "pressed"))
    with pytest.raises(KeyboardInterrupt, match="everything is saved") as stopped, suppress(Exception):
        tune(task, SGD, tmp_path / "study", algorithm=shoal.Grid(epochs=8))
    assert stopped.type is shoal.StudyInterrupted
    assert {job.outcome for job in jobs(tmp_path / "study")} == {"finished", "stopped"}
    assert {str(row.state) for row in shoal.Study(tmp_path / "study").trials} == {"pending"}
    study = shoal.resume(tmp_path / "study", show_progress=False)
    for number, curve in curves(study.directory).items():
        wanted = plain_loop(tasks.Momentum(), study.trials[number].trial, 8)
        assert [curve[epoch]["valid_loss"] for epoch in range(1, 9)] == pytest.approx(
            [wanted[epoch]["valid_loss"] for epoch in range(1, 9)], rel=RELATIVE
        )


def test_the_paths_of_the_first_run_are_there_in_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks.InterruptedAfter(20, str(tmp_path / "pressed"))
    with pytest.raises(shoal.StudyInterrupted):
        tune(task, SGD, tmp_path / "study", algorithm=shoal.Grid(epochs=8))
    here = str(Path(tasks.__file__).parent)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != here])
    shoal.resume(tmp_path / "study", show_progress=False)
    assert here in sys.path


def test_an_optimizer_of_some_parameters_is_said_once_whoever_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = RATES | {"width": shoal.choice([6, 8])}
    study = tune(
        tasks.WithoutBiases(),
        space,
        tmp_path / "study",
        algorithm=shoal.Grid(epochs=1),
        backend="local",
        devices="cpu:2",
        show_progress=True,
    )
    assert len({job.device for job in jobs(study.directory) if job.purpose is Purpose.SIGNATURE}) == 2
    unusual = "the task's `optimizer` leaves out parameters of the model ('0.bias', '2.bias')"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if unusual in line]
    assert " note: trial " in said
    assert not [path for path in (study.directory / "logs").iterdir() if unusual in path.read_text()]
    status = CliRunner().invoke(app, ["status", str(study.directory)]).output
    assert sum(line.startswith("note") for line in status.splitlines()) == 1
    assert "keep their initial values" in " ".join(status.split())


class Hooked(tasks.Blobs):
    """A parameter has a hook, which no array can have."""

    def model(self, config: Any) -> torch.nn.Module:
        model = super().model(config)
        next(model.parameters()).register_hook(lambda gradient: gradient)
        return model


class Asking(tasks.Blobs):
    """The first step shows that no array can take it: it asks for a number of one member."""

    def step(self, model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss * (1.0 if float(loss.detach()) > 0 else 0.0)


class AskingLater(tasks.Blobs):
    """A step after the first shows it."""

    def model(self, config: Any) -> torch.nn.Module:
        model = super().model(config)
        model.calls = 0
        return model

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if model.training:
            model.calls += 1
            if model.calls == 60 and loss.item() > 100:
                return loss * 0
        return loss


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Hooked, "hook"),
        (Asking, r"the task's `step`, Asking\.step \(test_results\.py:\d+\): a plain value"),
        (AskingLater, r"AskingLater\.loss \(test_results\.py:\d+\): a plain value"),
        (tasks.Blobs, ""),
    ],
    ids=["made", "stepped", "later", "fused"],
)
def test_why_members_cannot_be_fused_is_said_once_for_each_structure(
    kind: type[shoal.Task], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = RATES | {"width": shoal.grid([6, 8])}
    study = tune(kind(), space, tmp_path / "study", algorithm=shoal.Grid(epochs=10), show_progress=True)
    said = [line for line in capsys.readouterr().err.splitlines() if " plain, " in line]
    assert len(said) == (2 if reason else 0)
    assert all(re.search(reason, line) for line in said)
    status = json.loads(CliRunner().invoke(app, ["status", str(study.directory), "--json"]).output)
    assert [bool(re.search(reason, each["refusal"])) for each in status["arrays"] if each["refusal"]] == [True] * len(
        said
    )
    assert not status["note"]
