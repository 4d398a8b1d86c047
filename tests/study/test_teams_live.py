"""A study in real processes whose job grows into an idle slot: the result of an undisturbed study."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.audit import faults_of_teams
from torch import nn

import shoal
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.journal.view import JournalView

EPOCHS = 40


class Net(shoal.Task):
    """A regression with batch norm and dropout, in two steps an epoch."""

    def data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(500, 64, generator=generator, dtype=torch.float64)
        return (torch.utils.data.TensorDataset(x, x[:, :1]),) * 2

    def model(self, config: dict[str, Any]) -> nn.Module:
        width = config["width"]
        hidden = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1))
        return nn.Sequential(hidden, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)).double()

    def optimizer(self, model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class Shared(Net):
    """The same, in no hurry before two devices have trained a batch together.

    Args:
        marker: file that is made when they have.
    """

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training and len(batch[0]) < 200:  # a part of a batch of 244 or 256
            self.marker.touch()
        elif model.training and not self.marker.exists():
            time.sleep(0.25)
        return super().loss(model, batch)


def searched(directory: Path, task: shoal.Task, **settings: Any) -> shoal.Study:
    return shoal.tune(
        task, {"width": shoal.choice([256]), "batch_size": 256}, metric="valid_loss", mode="min",
        algorithm=shoal.Grid(EPOCHS), packing="none", directory=directory, seed=0, show_progress=False, **settings,
    )  # fmt: skip


@pytest.mark.slow
def test_a_job_grows_into_an_idle_slot_and_learns_the_same(tmp_path: Path) -> None:
    marker = tmp_path / "shared"
    grown = searched(tmp_path / "grown", Shared(marker), policy="water_filling", devices="cpu:2")
    assert marker.exists(), "two devices have trained a batch together"
    with JournalView.read(tmp_path / "grown") as journal:
        jobs = {job.id: job for job in journal.jobs()}
        assert faults_of_teams(journal) == []
    helpers = [job for job in jobs.values() if job.purpose is Purpose.ASSIST]
    assert helpers
    for helper in helpers:
        assert helper.outcome in (Outcome.FINISHED, Outcome.STOPPED), helper.message
        assert jobs[helper.assists].device != helper.device
    alone = searched(tmp_path / "alone", Net(), policy="fifo", devices="cpu:1", backend="inline")
    for one, other in zip(grown.trials, alone.trials, strict=True):
        assert (one.config, one.epoch) == (other.config, EPOCHS)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-9)
