"""Trials of different structures, batch sizes and optimizers, trained in one job or each alone."""

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
from shoal.core.job import Job
from shoal.core.trial import Report, Trial
from shoal.data.datasets import DataSets
from shoal.task import Task
from shoal.worker.checkpoint import load_newest
from shoal.worker.control import JobControl
from shoal.worker.signature_builder import SignatureBuilder
from shoal.worker.train import Trainer
from shoal.worker.worker_state import TrialCache, WorkerState

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
    """Small models of several kinds; one asks for a number of its own, and so is not an array."""

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
    """Samples that are made one by one, each time it is noted which."""

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
    """Other numbers at each epoch, from all three generators."""

    def noise(self) -> Any:
        return 0.1 * torch.rand(5) + 0.1 * random.random() + 0.1 * np.random.rand()


class Decoded(Mixed):
    """Samples that have to be made."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        self.train_set = Counted(train)
        return self.train_set, valid


class Features(Dataset[Any]):
    """What a frozen base makes of samples."""

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
    """A frozen featuriser before all models, as part of the samples."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        self.train_set = Features(train)
        return self.train_set, valid


class Augmented(Mixed):
    """Samples that are disturbed in each batch anew."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        self.train_set = Disturbed(train)
        return self.train_set, valid


class SharedNoise(Augmented):
    """Samples that are disturbed in each epoch anew, for all trials alike."""

    shared_augmentation = True


class DrawsItself(Mixed):
    """A loss with numbers of Python's and of torch's generators, beside samples that have to be made."""

    def data(self, config: Any) -> tuple[Any, Any]:
        train, valid = super().data(config)
        return Counted(train), valid

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))


class DrawsLate(Mixed):
    """A loss that draws numbers of all three generators, but in the last, partial batch of an epoch alone."""

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
    """A process that trains jobs of a task; `run` yields what a job does."""

    def __init__(self, task: Task, directory: Path) -> None:
        self.sets = DataSets(task, CPU)
        self.signature_builder = SignatureBuilder(task, self.sets)
        self.worker_state = WorkerState(task, self.sets, TrialCache(), CPU, directory)

    def key(self, number: int) -> FusionKey:
        return self.signature_builder.key(trial(number))

    def arrays(self, members: Iterable[Member]) -> tuple[Array, ...]:
        """The members by their keys."""
        by_key: dict[FusionKey, list[Member]] = {}
        for member in members:
            by_key.setdefault(self.key(member.trial.number), []).append(member)
        return tuple(Array(key, tuple(some)) for key, some in by_key.items())

    def run(self, members: Sequence[Member], control: JobControl | None = None, seconds: float = 30.0) -> list[Event]:
        job = Job("job", self.arrays(members))
        trainer = Trainer(job, self.worker_state, self.signature_builder, control or JobControl(prompt=True), seconds)
        return list(trainer.run())


def whole(number: int, epochs: int = EPOCHS) -> Member:
    return Member(trial(number), 0, epochs)


def reports_in(events: Iterable[Event]) -> list[Report]:
    return [report for event in events if isinstance(event, Reported) for report in event.reports]


@cache
def alone(kind: str, number: int) -> tuple[dict[int, Any], dict[str, Tensor]]:
    """What a trial reports and becomes without any company."""
    with TemporaryDirectory() as folder:
        events = Shop(TASKS[kind](), Path(folder)).run([whole(number)])
        checkpoint = load_newest(Path(folder), number)
    assert checkpoint is not None
    return {report.epoch: report.metrics for report in reports_in(events)}, checkpoint.model
