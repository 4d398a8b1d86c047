"""A multi-layer perceptron on handwritten digits of 8 x 8 pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["workload"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y)


def adam(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-3 * factor)


def workload(full: bool) -> Workload:
    return Workload(
        name="MLP",
        sizes="64-64-64-10, N=32, Adam",
        samples=32,
        model=model,
        batch=lambda: (torch.rand(32, 64), torch.randint(0, 10, (32,))),
        phases=(Phase(loss, adam),),
    )
