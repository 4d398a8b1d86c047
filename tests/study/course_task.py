"""The courses of the table of points as a task: its model counts its epochs, so that they are the same in any array."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from points import ALGORITHMS, POINTS, SEED, best_at, course
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import shoal


class Counter(nn.Module):
    """Its parameter `epochs` grows by 1 at each step, of which an epoch has one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.unused = nn.Linear(1, config["width"])  # other widths are other structures
        self.epochs = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.noise = nn.Parameter(torch.rand((), dtype=torch.float64))
        for name, value in {"x": config["x"], "best_at": best_at(config["x"]), "fold": config.get("fold", 0)}.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.epochs * x


class Course(shoal.Task):
    """Reports the courses of its trials.

    Args:
        directory: Directory of the study; beside it a file has a byte for each step after the first checkpoint.
        dies_at: Number of such a step, from 1, in which it kills the process that made it; 0: never.
    """

    def __init__(self, directory: Path, dies_at: int) -> None:
        self.directory, self.dies_at, self.engine = directory, dies_at, os.getpid()

    def data(self, config: Any) -> tuple[TensorDataset, TensorDataset]:
        samples = TensorDataset(torch.ones(4 + config.get("fold", 0), 1, dtype=torch.float64))
        return samples, samples

    def batch_size(self, config: Any) -> int:
        return 8

    def model(self, config: Any) -> nn.Module:
        return Counter(config)

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.SGD([model.epochs], lr=1.0)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.dies_at and torch.is_grad_enabled() and any(self.directory.glob("checkpoints/*/*.pt")):
            with self.directory.with_suffix(".steps").open("ab") as file:
                file.write(b".")
                step = file.tell()
            if step == self.dies_at:
                os.kill(self.engine, signal.SIGKILL)
        return -model(batch[0]).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return course(model.x, model.best_at, model.noise + model.fold, model.epochs)


def begin(row: str, name: str, directory: Path, *, warm_start: Sequence[Path], dies_at: int = 0) -> shoal.Study:
    """Begin a study of a point; one that dies has the arguments that disturb it, but for its timeout."""
    point = POINTS[row]
    given = {**point.arguments, **(point.disturbing if dies_at else {})}
    for own in ("extend", "timeout"):
        given.pop(own, None)
    where = {"devices": "cpu:2", "backend": "local"} if dies_at else {"devices": "cpu:1", "backend": "inline"}
    usual = {"metric": "loss", "mode": "min", "algorithm": ALGORITHMS[name](), "seed": SEED, **where}
    task = Course(directory, dies_at)
    study = {"directory": directory, "warm_start": list(warm_start), "checkpoint_seconds": 0.0, "show_progress": False}
    return shoal.tune(task, point.space_of(name), **{**usual, **given, **study})
