"""A multi-layer perceptron on handwritten digits of 8 x 8 pixels."""

import torch
from torch import nn

from models.workload import Batch, Phase, Workload, adam, cross_entropy

__all__ = ["workload"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batch() -> Batch:
    return torch.rand(32, 64), torch.randint(0, 10, (32,))


def workload(full: bool) -> Workload:
    return Workload("64-64-64-10, N=32, Adam", 32, model, batch, (Phase(cross_entropy, adam),))
