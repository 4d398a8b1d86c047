"""What the programs of the corpus have in common: data, an optimizer and a loss, in float64."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

FEATURES, CLASSES = 6, 3


class Program(shoal.Task):
    """Regression on 28 samples: four steps an epoch, the last of which has four samples."""

    def data(self, config: Any) -> Any:
        numbers = torch.Generator().manual_seed(0)
        x = torch.randn(40, FEATURES, generator=numbers, dtype=torch.float64)
        y = torch.randn(40, 1, generator=numbers, dtype=torch.float64) + x[:, :1].sin()
        return TensorDataset(x[:28], y[:28]), TensorDataset(x[28:], y[28:])

    def batch_size(self, config: Any) -> int:
        return 8

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))

    def model(self, config: Any) -> nn.Module:
        return self.net(config).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.5)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"error": (model(batch[0]) - batch[1]).abs().mean()}


class Labels(Program):
    """Classes instead of numbers."""

    def data(self, config: Any) -> Any:
        (x, y), (u, v) = (rows.tensors for rows in super().data(config))
        return TensorDataset(x, classes(y)), TensorDataset(u, classes(v))

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


class Words(Labels):
    """Five words of a vocabulary of seven to each sample."""

    def data(self, config: Any) -> Any:
        train, valid = super().data(config)
        return tuple(TensorDataset((x[:, :5].abs() * 3).long() % 7, y) for x, y in (train.tensors, valid.tensors))


def classes(y: Tensor) -> Tensor:
    return (y[:, 0] > -0.5).long() + (y[:, 0] > 0.5).long()
