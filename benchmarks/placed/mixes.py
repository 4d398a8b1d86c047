"""Trainings of several demands on CPU slots: bound by arithmetic, by memory or by input.

- arithmetic  a small ResNet, whose convolutions keep a core busy
- memory      a wide perceptron with batches of four: every step streams weights, gradients and momenta through memory
- input       a small perceptron whose samples come from slow storage, for which its core waits; a `time.sleep` in the
              data set stands for a network file system (`search_tasks/stored.py`)
"""

from typing import Any

import torch
import torch.nn.functional as F
from models.resnet import resnet
from packs.pictures import made
from search_tasks.search import Supervised
from search_tasks.stored import Stored
from torch import nn
from torch.utils.data import TensorDataset

import shoal

__all__ = ["BATCHES", "MIXES", "Mixed", "mix"]

PIXELS = 16
"""On a side of a picture, but for "memory"."""
WIDTH = 2048
"""Of the wide perceptron: its first layer has 6.3 million weights, 25 MB, which no cache of a core holds."""
BATCHES = {"arithmetic": 32, "memory": 4, "input": 16}
SAMPLES = {"arithmetic": 320, "memory": 32, "input": 200}
VALID = {"arithmetic": 64, "memory": 32, "input": 50}
SECONDS = 1e-3
"""Wait for a sample from storage."""
MIXES = {name: (name,) for name in BATCHES} | {"mixed": tuple(BATCHES)}


def mix(bounds: tuple[str, ...], jobs: int) -> dict[str, Any]:
    """So many jobs as a search space, equally many of each bound; neighbours differ in theirs."""
    rates = [1e-3 * 1.2**number for number in range(jobs // len(bounds))]
    return {"lr": shoal.grid(rates), "bound": shoal.choice(bounds)}


class Mixed(Supervised):
    """Classes of pictures of CIFAR-10, by a model and from a data set whose demand the configuration names.

    Args:
        part: Part of the samples that is used, for a quick run.
    """

    def __init__(self, part: float = 1.0) -> None:
        self.part = part

    def data(self, config):
        bound = config["bound"]
        counts = {"train": SAMPLES[bound], "test": VALID[bound]}
        return tuple(self._part(bound, name, max(8, int(self.part * count))) for name, count in counts.items())

    def _part(self, bound, name, count):
        x, y = made("tensors", name, range(count)).tensors
        if bound != "memory":
            x = F.avg_pool2d(x, x.shape[-1] // PIXELS)
        samples = TensorDataset(x, y)
        return Stored(samples, count, SECONDS) if bound == "input" else samples

    def model(self, config):
        match config["bound"]:
            case "arithmetic":
                return resnet(8, (1, 1, 1))
            case "memory":
                return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
            case _:
                return nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS**2, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def batch_size(self, config):
        return BATCHES[config["bound"]]
