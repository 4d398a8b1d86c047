"""A population: every copy continues from the weights and momenta of its parent, with settings of its own."""

import os
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from plain import check_equal, curves
from torch import nn

import shoal
from shoal.core.trial import Trial, TrialState
from shoal.journal.view import JournalView
from shoal.train.checkpoint import CheckpointWriter
from shoal.train.checkpoint_paths import checkpoint_directory
from shoal.train.data.loader import epoch_order

EPOCHS = 6


class Population(tasks.Blobs):
    """Momentum and a schedule, both of which a copy must get right."""

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, config["decay"])


SPACE = {"lr": shoal.loguniform(0.01, 0.3), "momentum": shoal.uniform(0.1, 0.9), "decay": shoal.uniform(0.5, 1.0)}


def search(directory: Path, **arguments: Any) -> shoal.Study:
    return shoal.tune(
        Population(),
        SPACE,
        metric="valid_loss",
        mode="min",
        algorithm=shoal.PBT(n=6, epochs=EPOCHS, interval=2, truncation=0.34),
        directory=directory,
        show_progress=False,
        **{"backend": "inline", "devices": "cpu:1", **arguments},
    )


def plain(task: Population, trial: Trial, others: dict[int, Trial], epochs: int) -> Any:
    """A trial in plain PyTorch: its model, its optimizer's state, and its metrics by epoch."""
    config = trial.config
    torch.manual_seed(trial.seed)
    model = task.model(config)
    momenta: dict[int, Any] = {}
    start = 0
    if trial.origin is not None:
        start = trial.origin.epoch
        parent, momenta, _ = plain(task, others[trial.origin.trial], others, start)
        model.load_state_dict(parent.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": momenta})
    (x, y), (x_valid, y_valid) = (part.tensors for part in task.data(config))
    curve = {}
    for epoch in range(start, epochs):
        optimizer.param_groups[0]["lr"] = config["lr"] * config["decay"] ** epoch
        model.train()
        for rows in epoch_order(len(x), trial.data_seed, epoch).split(task.batch_size(config)):
            task.step(model, (x[rows], y[rows]), optimizer)
        model.eval()
        with torch.no_grad():
            batch = (x_valid, y_valid)
            metrics = {"valid_loss": task.loss(model, batch), **task.metrics(model, batch)}
        curve[epoch + 1] = {name: float(value) for name, value in metrics.items()}
    return model, optimizer.state_dict()["state"], curve


@pytest.mark.parametrize(
    ("backend", "devices"), [("inline", "cpu:1"), pytest.param("local", "cpu:2", marks=pytest.mark.thorough)]
)
def test_copies_are_what_plain_pytorch_makes_of_their_parents(backend: str, devices: str, tmp_path: Path) -> None:
    study = search(tmp_path / "study", backend=backend, devices=devices)
    rows = {row.number: row for row in study.trials}
    trials = {number: row.trial for number, row in rows.items()}
    copies = [trial for trial in trials.values() if trial.origin is not None]
    assert len(copies) == 4
    wanted = {number: plain(Population(), trial, trials, rows[number].epoch)[2] for number, trial in trials.items()}
    found = curves(study.directory)
    assert {n: sorted(c) for n, c in found.items()} == {n: sorted(c) for n, c in wanted.items()}
    check_equal(found, wanted)
    assert [row.state for row in rows.values()].count(TrialState.COMPLETE) == 6
    assert study.best_trial.epoch == EPOCHS


def test_a_population_goes_on_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = search(tmp_path / "undisturbed")
    loss = Population.loss
    calls = 0

    def interrupted(self: Population, model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 25:
            raise KeyboardInterrupt
        return loss(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Population, "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "study")
    resumed = shoal.resume(tmp_path / "study", show_progress=False)
    check_equal(curves(resumed.directory), curves(undisturbed.directory))
    assert [row.state for row in resumed.trials] == [row.state for row in undisturbed.trials]


def test_a_copy_whose_parent_has_lost_its_checkpoint_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study"
    end_epoch = shoal.train.trial_runtime.TrialRuntime.save  # type: ignore[attr-defined]

    def forgetful(runtime: Any, writer: CheckpointWriter, outside: str) -> None:
        end_epoch(runtime, writer, outside)
        writer.flush()
        for path in checkpoint_directory(study, runtime.trial.number).glob("000002-*.pt"):
            os.unlink(path)

    monkeypatch.setattr(shoal.train.trial_runtime.TrialRuntime, "save", forgetful)  # type: ignore[attr-defined]
    search(study)
    with JournalView.read(study) as journal:
        failed = [row for row in journal.trials() if row.state is TrialState.FAILED]
    assert len(failed) == 2
    assert all("whose checkpoint is gone from" in row.reason for row in failed)
