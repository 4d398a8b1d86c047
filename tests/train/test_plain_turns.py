"""Members of an array whose plain steps are the fastest train whole epochs, one after another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.fused_stepper import FusedStepper

TRIALS, EPOCHS, STEPS = 3, 3, 4


class Line(shoal.Task):
    def data(self, config: Any) -> Any:
        x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x[:16], x[:16].sum(1)), TensorDataset(x[16:], x[16:].sum(1))

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).squeeze(1), y)


def searched(directory: Path) -> list[list[float]]:
    study = shoal.tune(
        Line(), {"lr": shoal.grid([0.1, 0.01, 0.001]), "batch_size": 4}, metric="valid_loss", mode="min",
        algorithm=shoal.Grid(epochs=EPOCHS), devices="cpu:1", backend="inline", directory=directory,
        show_progress=False,
    )  # fmt: skip
    return [[epoch["valid_loss"] for epoch in study.history(trial).to_dict("records")] for trial in range(TRIALS)]


def test_after_the_first_epoch_members_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = searched(tmp_path / "together")
    sizes: list[int] = []
    take = ArrayTrainer._take_step

    def counted(trainer: ArrayTrainer, stepper: Any, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        sizes.append(len(batches))
        return take(trainer, stepper, batches, ticks)

    monkeypatch.setattr(ArrayTrainer, "_take_step", counted)
    monkeypatch.setattr(FusedStepper, "plain_is_fastest", property(lambda stepper: len(stepper.runtimes) > 1))
    in_turns = searched(tmp_path / "in turns")
    assert sizes == [TRIALS] * STEPS + [1] * (EPOCHS - 1) * STEPS * TRIALS
    torch.testing.assert_close(torch.tensor(in_turns), torch.tensor(together), rtol=1e-9, atol=0)
