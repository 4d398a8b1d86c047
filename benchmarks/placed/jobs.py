"""The vision models of HyperSack's search spaces, and the task that trains them on CIFAR-10."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models.mobilenet import LAYERS, mobilenet_v3_large
from models.resnet import BLOCKS, resnet
from models.shufflenet import CHANNELS, shufflenet_v2
from models.vit import VisionTransformer
from packs.pictures import made
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import shoal
from shoal.core.trial import Config

__all__ = ["FULL", "QUICK", "SMALL", "Pictures", "Sizes"]

MODELS: dict[bool, dict[str, Callable[[], nn.Module]]] = {
    False: {
        "ShuffleNet": lambda: shufflenet_v2((16, 32, 64, 128), (2, 2)),
        "MobileNet": lambda: mobilenet_v3_large(0.25, [block for block in LAYERS if block[-1] > 1]),
        "ViT": lambda: VisionTransformer(64, 2, 2, patches=4, patch=4, predicting=1),
        "DeiT": lambda: VisionTransformer(64, 2, 2, patches=4, patch=4, predicting=2),
        "ResNet-8": lambda: resnet(8, (1, 1, 1)),
        "ResNet-14": lambda: resnet(8, (2, 2, 2)),
    },
    True: {
        "ShuffleNet": lambda: shufflenet_v2(CHANNELS[1.0]),
        "MobileNet": lambda: mobilenet_v3_large(1.0),
        "ViT": lambda: VisionTransformer(192, 12, 3, patches=8, patch=4, predicting=1),
        "DeiT": lambda: VisionTransformer(192, 12, 3, patches=8, patch=4, predicting=2),
        "ResNet-18": lambda: resnet(64, BLOCKS[18]),
        "ResNet-34": lambda: resnet(64, BLOCKS[34]),
    },
}
"""By whether they are HyperSack's, for a GPU and pictures of 32 x 32 pixels; else they are parts of these, for a core
of a CPU and half as many pixels on a side."""


@dataclass(frozen=True)
class Sizes:
    """How much there is to train.

    Args:
        full: which of `MODELS`.
        models: names of those that are trained.
        samples: to train on.
        valid: to validate on.
    """

    full: bool
    models: tuple[str, ...]
    samples: int
    valid: int

    @property
    def pixels(self) -> int:
        """On a side of a picture."""
        return 32 if self.full else 16


SMALL = Sizes(False, tuple(MODELS[False]), samples=1200, valid=200)
FULL = Sizes(True, tuple(MODELS[True]), samples=5000, valid=1000)
QUICK = Sizes(False, ("ViT", "ResNet-8"), samples=24, valid=8)


class Pictures(shoal.Task):
    """Cross entropy on CIFAR-10, by whichever model the configuration names."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def data(self, config: Config) -> tuple[TensorDataset, TensorDataset]:
        return self._part("train", self.sizes.samples), self._part("test", self.sizes.valid)

    def _part(self, name: str, samples: int) -> TensorDataset:
        x, y = made("tensors", name, range(samples)).tensors
        return TensorDataset(F.avg_pool2d(x, x.shape[-1] // self.sizes.pixels), y)

    def model(self, config: Config) -> nn.Module:
        return MODELS[self.sizes.full][config["model"]]()

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}
