"""The task of the studies that older versions of Shoal have begun: `begun_by_version_3` and later ones."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

__all__ = ["Line"]


class Line(shoal.Task):
    def data(self, config):
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(-1, 1)
        return TensorDataset(x, 3 * x + 1), TensorDataset(x, 3 * x + 1)

    def model(self, config):
        return nn.Linear(1, 1).double()

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])
