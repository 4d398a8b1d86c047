"""One finished study for all tests that only read one: made once in a run of pytest, and copied."""

import fcntl
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

__all__ = ["Noisy", "made_once", "search"]

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


def search(directory: Path, kind: type[Any] = shoal.SuccessiveHalving) -> shoal.Study:
    """A study of 8 trials on 2 slots, of which the best train 4 epochs, in this process.

    Args:
        kind: Class of an algorithm with rungs.
    """
    return shoal.tune(
        Noisy(), {"lr": shoal.loguniform(1e-3, 1e-1)}, metric="valid_loss", mode="min", backend="inline",
        algorithm=kind(n=8, max_epochs=4, eta=2), devices="cpu:2",
        directory=directory, show_progress=False,
    )  # fmt: skip


def made_once(folder: Path) -> Path:
    """The directory of a study of `search` that has ended.

    Args:
        folder: of all processes of this run of pytest; the first one makes the study.
    """
    with (folder / "finished.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "finished").exists():
            patch.setenv("SHOAL_CACHE", str(folder / "cache of finished"))
            patch.setattr(torch, "set_num_threads", lambda threads: None)
            study = search(folder / "finishing")
            study.directory.rename(folder / "finished")
    return folder / "finished"
