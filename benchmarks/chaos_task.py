"""The task of `chaos.py`, whose process need not import torch for what is not a task."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

STEP_SECONDS = 0.02


class Spiral(shoal.Task):
    def data(self, config):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(140, 6, generator=generator, dtype=torch.float64)
        y = (x.prod(1) > 0).long()
        return TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:])

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2)).double()

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            time.sleep(STEP_SECONDS)
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).double().mean()}

    def batch_size(self, config):
        return 16
