"""Tiny models in float64, of a few structures, of which one now and then is said to run out of memory."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal

__all__ = ["SHORTAGE", "SPACE", "Spirals"]

STEP_SECONDS = 0.012

SHORTAGE = "INVENTED_SHORTAGE"
"""The variable that names a file; where that is, the next array that trains runs out of memory and renames it, to tell
of its job."""

trains = False
"""Whether the job of this process does; one that measures may run out of memory without any harm to a trial."""

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
    file = Path(os.environ[SHORTAGE])
    with suppress(FileNotFoundError):
        file.rename(file.with_name(f"{file.name}-{_job()}"))  # of several processes one succeeds
        raise torch.OutOfMemoryError("CUDA out of memory, as was asked for")


def _job() -> str:
    """Whose job this process does, by the log to which it writes."""
    return Path(os.readlink("/proc/self/fd/1")).stem
