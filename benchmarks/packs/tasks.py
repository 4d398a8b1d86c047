"""The paper's space of 1056 configurations on CIFAR-10, and batches as a plain PyTorch program makes them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shoal
from packs.networks import NETWORKS
from packs.pictures import PIPELINES, made
from shoal.core.trial import Config

__all__ = ["ACTIVATIONS", "METRIC", "OPTIMIZERS", "SPACE", "Cifar", "batches"]

METRIC = "valid_loss"
"""What Hyperband halves by. Accuracies on 1000 pictures are full of ties, which rounding would break."""
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
"""Liu et al., arXiv:2002.02885, table 3."""


class Cifar(shoal.Task):
    """Cross entropy on CIFAR-10.

    Args:
        network: Name of the network, unless a configuration names its `model`.
        pipeline: One of `PIPELINES`.
        folder: Folder of PNG files, which `pictures.write` has filled.
        train: Pictures to train on.
        test: Pictures to validate on.
        dtype: Type of pictures and weights.
    """

    shared_augmentation = True
    """All members of a pack see the same augmented picture, as those of the paper's do."""

    def __init__(
        self,
        network: str = "MLP-3",
        pipeline: str = "tensors",
        folder: Path | None = None,
        train: int = 5000,
        test: int = 1000,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if pipeline not in PIPELINES:
            raise ValueError(f"`pipeline` must be one of {', '.join(PIPELINES)}, got {pipeline!r}")
        self.network, self.pipeline, self.folder = network, pipeline, folder
        self.train, self.test, self.dtype = train, test, dtype

    def data(self, config: Config) -> tuple[Dataset[Any], Dataset[Any]]:
        """Configurations that name another `part` train on other pictures."""
        first = config.get("part", 0) * self.train
        rows = {"train": range(first, first + self.train), "test": range(self.test)}
        train, test = (made(self.pipeline, name, part, self.dtype, self.folder) for name, part in rows.items())
        return train, test

    def model(self, config: Config) -> nn.Module:
        return NETWORKS[config.get("model", self.network)](ACTIVATIONS[config["activation"]]).to(self.dtype)

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        return OPTIMIZERS[config["optimizer"]](model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).to(self.dtype).mean()}


def batches(dataset: Dataset[Any], size: int, order: Tensor) -> Iterator[list[Tensor]]:
    """Batches of samples in an order, int64 [samples]: the tensors of a `TensorDataset` are indexed at once."""
    if isinstance(dataset, TensorDataset):
        return ([tensor[part] for tensor in dataset.tensors] for part in order.split(size))
    return iter(DataLoader(dataset, batch_size=size, sampler=order.tolist()))
