"""Tiny models in float64, of a few structures; where a file says so, one of them runs out of memory."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

STEP_SECONDS = 0.012

SHORTAGE = "INVENTED_SHORTAGE"
"""The variable that names a file; where that is, the next array that trains runs out of memory and removes it."""

trains = False
"""Whether the job of this process does, on an invented GPU; one that measures may run out of memory without harm."""

SPACE = {
    "lr": shoal.loguniform(1e-3, 0.3),
    "momentum": shoal.uniform(0.0, 0.9),
    "width": shoal.choice([8, 12, 16]),
    "smooth": shoal.choice([True, False]),
}


class Spirals(shoal.Task):
    def data(self, config):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(140, 6, generator=generator, dtype=torch.float64)
        y = (x.prod(1) > 0).long()
        return TensorDataset(x[:112], y[:112]), TensorDataset(x[112:], y[112:])

    def model(self, config):
        between = nn.Tanh() if config["smooth"] else nn.ReLU()
        width = config["width"]
        return nn.Sequential(nn.Linear(6, width), between, nn.Dropout(0.1), nn.Linear(width, 2)).double()

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)

    def loss(self, model, batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        if torch.is_grad_enabled():
            time.sleep(STEP_SECONDS)
            if trains:
                _may_run_out_of_memory()
        return loss

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).double().mean()}

    def batch_size(self, config):
        return 16


def _may_run_out_of_memory() -> None:
    with suppress(FileNotFoundError):
        Path(os.environ[SHORTAGE]).unlink()  # of several processes one succeeds
        raise torch.OutOfMemoryError("CUDA out of memory, as was asked for")
