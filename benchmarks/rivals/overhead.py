"""What a step of a small model takes in a search's own loop, beside the same step in a plain loop."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.trial import Trial
from shoal.task import Task
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.data.datasets import DataSets
from shoal.train.worker_state import TrialCache, WorkerState

__all__ = ["overhead"]

SAMPLES, BATCH = 64_000, 32
STEPS = 200
"""Of each loop before it is the other's turn; the first ones are not timed."""


class Digits(Task):
    """An MLP of 64, 64 and 10 units on samples of the shape of handwritten digits."""

    def data(self, config: Any) -> Any:
        x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(0))
        y = torch.arange(SAMPLES) % 10
        return TensorDataset(x, y), TensorDataset(x[:BATCH], y[:BATCH])

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[config["optimizer"]](model.parameters())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
}


def overhead(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a step, by optimizer: in a plain loop that indexes tensors, in Shoal's, and the difference.

    Args:
        rounds: in which the loops take turns; medians are returned.
    """
    return {name: _measured(name, rounds) for name in OPTIMIZERS}


def _measured(optimizer: str, rounds: int) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        loops = {"plain": _plain(optimizer), "Shoal": _shoal(optimizer, Path(folder))}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(rounds + 1):
            for name, loop in loops.items():
                took = _timed(loop)
                if number:
                    seconds[name].append(took)
        found = {name: median(times) * 1e6 for name, times in seconds.items()}
    return {**found, "more": found["Shoal"] - found["plain"]}


def _timed(loop: Iterator[None]) -> float:
    """Seconds of a step."""
    for _ in islice(loop, STEPS // 10):
        pass
    began = time.perf_counter()
    for _ in islice(loop, STEPS):
        pass
    return (time.perf_counter() - began) / STEPS


def _plain(name: str) -> Iterator[None]:
    task = Digits()
    (x, y), model = task.data({})[0].tensors, task.model({})
    optimizer = task.optimizer(model, {"optimizer": name})
    while True:
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            yield


def _shoal(name: str, directory: Path) -> Iterator[None]:
    task, device = Digits(), torch.device("cpu")
    member = Member(Trial(0, {"optimizer": name}, 0, 0), 0, 10**6)
    worker_state = WorkerState(task, DataSets(task, device), TrialCache(), device, directory)
    eager = Profile(
        {1: 1e-3}, SAMPLES // BATCH, 1, 0, 0, 1.0, 1.0, compiled_gain={1: 1.0}
    )  # what compiling is not worth
    lane = ArrayTrainer("overhead", Array(FusionKey("digits", "data", BATCH), (member,), profile=eager), worker_state)
    while True:
        lane.prepare()
        while lane.advance():
            yield
