"""The four CNNs of Hermes with few channels, and their training on handwritten digits of 14 x 14 pixels (MNIST).

All have batch norm, so that a training of a second shows which settings are good. Of GoogLeNet and ResNet-50 each stage
has one block; VGG has all its layers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from search_tasks.pictures import pictures
from search_tasks.search import Supervised
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["CNNS", "OPTIMIZERS", "Digits"]

WIDTH = 8
"""Channels of the first stage."""
VALID = 250
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
}


def norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm by the batch alone, in validation as well: running means lag behind a training of few steps."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


def conv(before: int, after: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, norm(after), nn.ReLU())


class Inception(nn.Module):
    """Four branches side by side (Szegedy et al. 2015): 1 x 1, 3 x 3, 5 x 5 and a pool."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        part = after // 4
        self.one = conv(before, part, 1)
        self.three = nn.Sequential(conv(before, part // 2, 1), conv(part // 2, part))
        self.five = nn.Sequential(conv(before, part // 2, 1), conv(part // 2, part, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(before, part, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut (He et al. 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inside = after // 4
        self.convs = nn.Sequential(
            conv(before, inside, 1), conv(inside, inside, stride=stride), conv(inside, after, 1)[:-1]
        )
        self.shortcut = conv(before, after, 1, stride)[:-1]

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs(x) + self.shortcut(x))


def googlenet() -> nn.Sequential:
    blocks: list[nn.Module] = [conv(1, WIDTH), nn.MaxPool2d(2, ceil_mode=True)]
    for stage in (1, 2, 4):
        blocks += [Inception(WIDTH * stage, 2 * WIDTH * stage), nn.MaxPool2d(2, ceil_mode=True)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * WIDTH, 10))


def resnet50() -> nn.Sequential:
    widths = [WIDTH, *(2 * WIDTH * 2**stage for stage in range(4))]
    blocks = [Bottleneck(*pair, stride=1 + bool(stage)) for stage, pair in enumerate(pairwise(widths))]
    return nn.Sequential(conv(1, WIDTH), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def vgg(layers: tuple[int, ...]) -> nn.Sequential:
    blocks: list[nn.Module] = []
    before = 1
    for stage, count in enumerate(layers):
        after = WIDTH * min(2**stage, 8)
        for _ in range(count):
            blocks.append(conv(before, after))
            before = after
        blocks.append(nn.MaxPool2d(2, ceil_mode=True))
    hidden = 8 * WIDTH
    classes = (nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return nn.Sequential(*blocks, nn.Flatten(), *classes)


CNNS: dict[str, Callable[[], nn.Module]] = {
    "GoogLeNet": googlenet,
    "VGG16": lambda: vgg((2, 2, 3, 3, 3)),
    "VGG19": lambda: vgg((2, 2, 4, 4, 4)),
    "ResNet50": resnet50,
}


class Digits(Supervised):
    """A CNN on pictures of MNIST; a trial has the optimizer, batch size, rate and decay at its place in `settings`."""

    def __init__(self, file: Path, cnn: str, train: int, settings: Sequence[Mapping[str, Any]]) -> None:
        self.file, self.cnn, self.train, self.settings = file, cnn, train, settings

    def data(self, config):
        sets = [pictures(self.file, part, count) for part, count in (("train", self.train), ("test", VALID))]
        return tuple(TensorDataset(F.avg_pool2d(x, 2), y) for x, y in sets)

    def batch_size(self, config):
        return self.settings[config["place"]]["batch_size"]

    def eval_batch_size(self, config):
        return VALID

    def model(self, config):
        return CNNS[self.cnn]()

    def optimizer(self, model, config):
        own = self.settings[config["place"]]
        return OPTIMIZERS[own["optimizer"]](model.parameters(), lr=own["lr"], weight_decay=own["weight_decay"])
