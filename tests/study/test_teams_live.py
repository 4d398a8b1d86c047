"""A study in real processes whose job grows into an idle slot: the result of an undisturbed study."""

import time
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from support.audit import faults_of_teams
from torch import nn

import shoal
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.cost.history import History, environment
from shoal.journal.view import JournalView

EPOCHS = 250


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


class SlowNet(Net):
    """The same with training that takes 0.5 ms a sample, of which two devices take half each however busy they are."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            time.sleep(5e-4 * len(batch[0]))
        return super().loss(model, batch)


def searched(directory: Path, task: shoal.Task | None = None, epochs: int = EPOCHS, **settings: Any) -> shoal.Study:
    return shoal.tune(
        task or Net(), {"width": shoal.choice([256]), "batch_size": 256}, metric="valid_loss", mode="min",
        algorithm=shoal.Grid(epochs), packing="none", directory=directory, seed=0, show_progress=False, **settings,
    )  # fmt: skip


@pytest.mark.slow
def test_a_job_grows_into_an_idle_slot_and_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    grown = searched(tmp_path / "grown", policy="water_filling", devices="cpu:2")
    with JournalView.read(tmp_path / "grown") as journal:
        jobs = {job.id: job for job in journal.jobs()}
        assert faults_of_teams(journal) == []
    helpers = [job for job in jobs.values() if job.purpose is Purpose.ASSIST]
    assert helpers
    for helper in helpers:
        assert helper.outcome in (Outcome.FINISHED, Outcome.STOPPED), helper.message
        assert jobs[helper.assists].device != helper.device
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "other cache"))
    alone = searched(tmp_path / "alone", policy="fifo", devices="cpu:1", backend="inline")
    for one, other in zip(grown.trials, alone.trials, strict=True):
        assert (one.config, one.epoch) == (other.config, EPOCHS)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-9)


@pytest.mark.slow
def test_a_helper_that_was_measured_to_pay_is_kept_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    searched(tmp_path / "study", SlowNet(), epochs=60, policy="water_filling", devices="cpu:2")
    with JournalView.read(tmp_path / "study") as journal:
        jobs = {job.id: job for job in journal.jobs()}
        assert faults_of_teams(journal) == []
    leader, helper = (next(x for x in jobs.values() if x.purpose is each) for each in (Purpose.TRAIN, Purpose.ASSIST))
    assert [job.purpose for job in jobs.values()].count(Purpose.ASSIST) == 1, "it was not given back and tried again"
    assert helper.assists == leader.id
    assert helper.outcome == Outcome.FINISHED or (helper.ended or 0.0) >= (leader.ended or inf), "it was given back"
    measured = [profile.spreading for profile in History(environment=environment()).all().values()]
    assert [list(each) for each in measured] == [[2]], "steps on two devices were measured"
