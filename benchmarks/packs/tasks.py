"""The paper's space of 1056 configurations on CIFAR-10, and the packs of it that are trained side by side."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import shoal
from packs.networks import NETWORKS
from packs.pictures import made
from shoal.core.trial import Config

__all__ = ["CASES", "METRIC", "SPACE", "Case", "Cifar", "equal"]

METRIC = "valid_loss"
"""Hyperband halves by the loss. Accuracies on 1000 pictures are full of ties, which rounding would break."""
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Momentum": partial(torch.optim.SGD, momentum=0.9),
}
ACTIVATIONS: dict[str, type[nn.Module]] = {each.__name__: each for each in (nn.Sigmoid, nn.LeakyReLU, nn.Tanh, nn.ReLU)}
SPACE: dict[str, Any] = {
    "batch_size": shoal.choice(list(range(20, 75, 5))),
    "optimizer": shoal.choice(list(OPTIMIZERS)),
    "lr": shoal.choice([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]),
    "activation": shoal.choice(list(ACTIVATIONS)),
}
"""Liu et al., arXiv:2002.02885, table 3."""


class Cifar(shoal.Task):
    """Cross entropy on CIFAR-10.

    Args:
        network: Name of the network, unless a configuration names its `model`.
        pipeline: One of `pictures.PIPELINES`.
        train: Pictures to train on.
        test: Pictures to validate on.
        folder: Folder of PNG files, which `pictures.write` has filled.
    """

    shared_augmentation = True
    """All members of a pack see the same augmented picture, as those of the paper's do."""

    def __init__(self, network: str, pipeline: str, train: int, test: int, folder: Path = Path()) -> None:
        self.network, self.pipeline, self.train, self.test, self.folder = network, pipeline, train, test, folder

    def data(self, config: Config) -> tuple[Dataset[Any], Dataset[Any]]:
        """Configurations that name another `part` train on other pictures."""
        first = config.get("part", 0) * self.train
        rows = {"train": range(first, first + self.train), "test": range(self.test)}
        train, test = (made(self.pipeline, name, part, self.folder) for name, part in rows.items())
        return train, test

    def model(self, config: Config) -> nn.Module:
        return NETWORKS[config.get("model", self.network)](ACTIVATIONS[config["activation"]])

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        return OPTIMIZERS[config["optimizer"]](model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Case:
    """A pack whose members take the entries of each factor in turn.

    Args:
        name: Name of the network, or of the factor that differs.
        factors: Key of configurations -> values. Members of different parts have no picture in common.
        pipeline: "tensors" leaves preprocessing out of the step, "png" has it in.
        members: Number of members.
        samples: Number of samples of each member's training set.
        folder: Folder of the PNG files.
        device: Device of models, and of data that are tensors beforehand.
    """

    name: str
    factors: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    pipeline: str = "tensors"
    members: int = 2
    samples: int = 1250
    folder: Path = Path()
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    @property
    def configs(self) -> list[Config]:
        """The configurations of all members; each has a learning rate of its own."""
        alike = {"model": ("MLP-3",), "part": (0,), "optimizer": ("Momentum",), "batch_size": (50,)}
        return [
            {name: values[number % len(values)] for name, values in (alike | self.factors).items()}
            | {"lr": 0.001 * (1 + number / 16), "activation": "ReLU"}
            for number in range(self.members)
        ]

    @property
    def task(self) -> Cifar:
        return Cifar("MLP-3", self.pipeline, self.samples, 1, self.folder)

    def per_step(self, seconds: float) -> float:
        """The part of an epoch's seconds in which every member sees as many samples as the largest batch has."""
        return seconds * max(config["batch_size"] for config in self.configs) / self.samples


def equal(network: str, members: int) -> Case:
    """Equal networks."""
    return Case(network, {"model": (network,)}, members=members, samples=1250 if network == "MLP-3" else 300)


FACTORS: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {"model": ("MLP-3", "MobileNet")},
    "data": {"part": (0, 1)},
    "optimizer": {"optimizer": ("Momentum", "SGD", "Adam", "Adagrad")},
    "batch size": {"batch_size": (50, 20, 70, 40)},
}
"""Liu et al., section 4.7, table 2."""
ABLATION = {"none": {}, **FACTORS, "all": {key: values for each in FACTORS.values() for key, values in each.items()}}
CASES = (
    *(equal(network, 8) for network in NETWORKS),
    *(Case(f"batches of {size}", {"batch_size": (size,)}) for size in (32, 100)),
    *(
        Case(name, factors, pipeline, samples=300 if "model" in factors else 1250)
        for pipeline in ("tensors", "png") for name, factors in ABLATION.items()
    ),
)  # fmt: skip
