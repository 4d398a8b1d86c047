"""Helpers that train trials of different structures, batch sizes and optimizers, in one job or each alone."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Event, Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Report, Trial
from shoal.task import Task
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
SAMPLES, EPOCHS = 14, 3

CONFIGS: tuple[dict[str, Any], ...] = (
    {"kind": "plain", "width": 4, "batch_size": 2, "optimizer": "Adam", "lr": 0.01},
    {"kind": "plain", "width": 4, "batch_size": 2, "optimizer": "Adam", "lr": 0.03},
    {"kind": "plain", "width": 7, "batch_size": 5, "optimizer": "Adagrad", "lr": 0.02},
    {"kind": "normed", "width": 4, "batch_size": 3, "optimizer": "SGD", "lr": 0.05},
    {"kind": "dropped", "width": 5, "batch_size": 5, "optimizer": "SGD", "lr": 0.04},
    {"kind": "dropped", "width": 5, "batch_size": 14, "optimizer": "Adam", "lr": 0.02},
    {"kind": "counts", "width": 4, "batch_size": 4, "optimizer": "Adam", "lr": 0.01},
    {"kind": "deep", "width": 3, "batch_size": 30, "optimizer": "RMSprop", "lr": 0.01},
    {"kind": "plain", "width": 4, "batch_size": 2, "optimizer": "SGD", "lr": 0.02},
)
"""Trials 0, 1 and 8 are one array; of trial 7 the data set is shorter than a batch."""

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    "Adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr),
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "RMSprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr=lr),
}


class Mixed(Task):
    """Has small models of several kinds; one of them reads a number, so it cannot be fused."""

    def data(self, config: Any) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES + 6, 5, generator=generator, dtype=torch.float64)
        y = torch.arange(SAMPLES + 6) % 3
        return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])

    def model(self, config: Any) -> nn.Module:
        width = config["width"]
        between: list[nn.Module] = {
            "plain": [nn.ReLU()],
            "normed": [nn.BatchNorm1d(width), nn.Tanh()],
            "dropped": [nn.Sigmoid(), nn.Dropout(0.3)],
            "counts": [nn.ReLU()],
            "deep": [nn.ReLU(), nn.Linear(width, width), nn.LeakyReLU()],
        }[config["kind"]]
        model = nn.Sequential(nn.Linear(5, width, bias=config["kind"] != "normed"), *between, nn.Linear(width, 3))
        model.counts = config["kind"] == "counts"
        return model.double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return OPTIMIZERS[config["optimizer"]](model.parameters(), config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return loss * float(torch.sign(model[0].weight.sum()).item() + 2) if model.counts else loss

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"sum": model(batch[0]).sum()}


class Counted(Dataset[Any]):
    """Data set that records which samples are fetched."""

    def __init__(self, whole: TensorDataset) -> None:
        self.whole = whole
        self.asked: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Any:
        self.asked[index] += 1
        x, y = self.whole[index]
        return x + self.noise(), y

    def noise(self) -> Any:
        return 0.0


class Disturbed(Counted):
    """Adds noise from all three generators, different in each epoch."""

    def noise(self) -> Any:
        return 0.1 * torch.rand(5) + 0.1 * random.random() + 0.1 * np.random.rand()


class Decoded(Mixed):
    """Has samples that must be decoded."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        self.train_set = Counted(train)
        return self.train_set, valid


class Features(Dataset[Any]):
    """Features that a frozen base model computes from samples."""

    def __init__(self, whole: TensorDataset) -> None:
        torch.manual_seed(3)
        self.whole = whole
        self.base = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)).double().eval()
        self.passes = 0

    def __len__(self) -> int:
        return len(self.whole)

    @torch.no_grad()
    def __getitem__(self, index: int) -> Any:
        self.passes += 1
        x, y = self.whole[index]
        return self.base(x.unsqueeze(0)).squeeze(0), y


class Featured(Mixed):
    """Computes features by a frozen base model in the data set."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        self.train_set = Features(train)
        return self.train_set, valid


class Augmented(Mixed):
    """Has random augmentation that differs in each batch."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        self.train_set = Disturbed(train)
        return self.train_set, valid


class SharedNoise(Augmented):
    """Has random augmentation that differs in each epoch and is shared by all trials."""

    shared_augmentation = True


class DrawsItself(Mixed):
    """Has a loss that draws from the generators of Python and torch, and samples that must be decoded."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        return Counted(train), valid

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))


class DrawsLate(Mixed):
    """Has a loss that draws from all three generators, but only in the last, partial batch of an epoch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if not model.training or len(batch[1]) in (2, 5, 3, 14, 30):
            return loss
        return loss * (1 + 0.1 * torch.rand((), dtype=loss.dtype) + 0.1 * random.random() + 0.1 * np.random.rand())


TASKS: dict[str, type[Mixed]] = {
    kind.__name__: kind for kind in (Mixed, Decoded, Featured, Augmented, SharedNoise, DrawsItself, DrawsLate)
}


def trial(number: int) -> Trial:
    return Trial(number, CONFIGS[number], seed=100 + number, data_seed=7)


class Shop:
    """Worker process that trains jobs of a task; `run` yields the events of a job."""

    def __init__(self, task: Task, directory: Path, device: torch.device = CPU) -> None:
        self.sets = DataSets(task, device)
        self.signature_builder = SignatureBuilder(task, self.sets)
        directory.mkdir(parents=True, exist_ok=True)
        self.worker_state = WorkerState(task, self.sets, TrialCache(), device, directory)

    def key(self, number: int) -> FusionKey:
        return self.signature_builder.key(trial(number))

    def arrays(self, members: Iterable[Member]) -> tuple[Array, ...]:
        """Group members into arrays by their keys."""
        by_key: dict[FusionKey, list[Member]] = {}
        for member in members:
            by_key.setdefault(self.key(member.trial.number), []).append(member)
        return tuple(Array(key, tuple(some)) for key, some in by_key.items())

    def run(self, members: Sequence[Member], control: JobControl | None = None, seconds: float = 30.0) -> list[Event]:
        job = Job("job", self.arrays(members))
        control = control or JobControl(prompt=True)
        context = WorkerContext(self.worker_state.directory, b"", checkpoint_seconds=seconds)
        trainer = Trainer(job, self.worker_state, self.signature_builder, control, context)
        return list(trainer.run())


def whole(number: int, epochs: int = EPOCHS) -> Member:
    return Member(trial(number), 0, epochs)


def reports_in(events: Iterable[Event]) -> list[Report]:
    return [report for event in events if isinstance(event, Reported) for report in event.reports]


@cache
def alone(kind: str, number: int) -> tuple[dict[int, Any], dict[str, Tensor]]:
    """Return the reports and the final weights of a trial that trains alone."""
    with TemporaryDirectory() as folder:
        events = Shop(TASKS[kind](), Path(folder)).run([whole(number)])
        checkpoint = load_newest(Path(folder), number)
    assert checkpoint is not None
    return {report.epoch: report.metrics for report in reports_in(events)}, checkpoint.model
