"""The paper's space of 1056 configurations, and two small models for it on CIFAR-10."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import shoal
from packs.pictures import PIPELINES, made
from shoal.core.trial import Config

__all__ = ["ACTIVATIONS", "MLP3", "OPTIMIZERS", "SPACE", "TASKS", "AnyModel", "Cifar", "SmallCNN"]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Momentum": partial(torch.optim.SGD, momentum=0.9),
}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Sigmoid": nn.Sigmoid,
    "LeakyReLU": nn.LeakyReLU,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
}
SPACE: dict[str, Any] = {
    "batch_size": shoal.choice(list(range(20, 75, 5))),
    "optimizer": shoal.choice(list(OPTIMIZERS)),
    "lr": shoal.choice([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]),
    "activation": shoal.choice(list(ACTIVATIONS)),
}
"""Liu et al., arXiv:2002.02885, section 5."""


class Cifar(shoal.Task):
    """Cross entropy on CIFAR-10.

    Args:
        pipeline: one of `PIPELINES`.
        folder: of PNG files, which `pictures.write` has filled.
        train: pictures to train on.
        test: pictures to validate on.
        dtype: of pictures and weights.
        workers: loader processes of each set.
    """

    shared_augmentation = True
    """All members of a pack see the same augmented picture, as those of the paper's do."""

    def __init__(
        self,
        pipeline: str = "tensors",
        folder: Path | None = None,
        train: int = 5000,
        test: int = 1000,
        dtype: torch.dtype = torch.float32,
        workers: int = 0,
    ) -> None:
        if pipeline not in PIPELINES:
            raise ValueError(f"`pipeline` must be one of {', '.join(PIPELINES)}, got {pipeline!r}")
        self.pipeline, self.folder, self.train, self.test, self.dtype = pipeline, folder, train, test, dtype
        self.loader_workers = workers

    def data(self, config: Config) -> tuple[Dataset[Any], Dataset[Any]]:
        """Configurations that name another `part` train on other pictures."""
        first = config.get("part", 0) * self.train
        rows = {"train": range(first, first + self.train), "test": range(self.test)}
        train, test = (made(self.pipeline, name, part, self.dtype, self.folder) for name, part in rows.items())
        return train, test

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        return OPTIMIZERS[config["optimizer"]](model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).to(self.dtype).mean()}


class MLP3(Cifar):
    """A perceptron of three layers."""

    def model(self, config: Config) -> nn.Module:
        return perceptron(64, ACTIVATIONS[config["activation"]]).to(self.dtype)


class SmallCNN(Cifar):
    """Two convolutions and two linear layers."""

    def model(self, config: Config) -> nn.Module:
        return convolutional(8, ACTIVATIONS[config["activation"]]).to(self.dtype)


class AnyModel(Cifar):
    """Whichever model, of whichever width, the configuration names."""

    kinds: ClassVar[dict[str, Callable[[int, type[nn.Module]], nn.Module]]]

    def model(self, config: Config) -> nn.Module:
        return self.kinds[config["model"]](config["width"], ACTIVATIONS[config["activation"]]).to(self.dtype)


def perceptron(width: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(3072, width), activation()),
        *(nn.Linear(width, width), activation()),
        nn.Linear(width, 10),
    )


def convolutional(width: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, stride=2, padding=1), activation()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2), activation()),
        *(nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(18 * width, 64), activation()),
        nn.Linear(64, 10),
    )


AnyModel.kinds = {"MLP-3": perceptron, "CNN": convolutional}

TASKS: dict[str, type[Cifar]] = {"MLP-3": MLP3, "CNN": SmallCNN}
