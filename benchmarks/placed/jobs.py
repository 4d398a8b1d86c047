"""The vision models of HyperSack's search spaces, and the task that trains them on CIFAR-10."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models.mobilenet import LAYERS, mobilenet_v3_large
from models.resnet import BLOCKS, resnet
from models.shufflenet import CHANNELS, shufflenet_v2
from models.vit import VisionTransformer
from packs.pictures import made
from search_tasks.search import Supervised
from torch import nn
from torch.utils.data import TensorDataset

__all__ = ["MODELS", "PIXELS", "Pictures"]

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
PIXELS = {False: 16, True: 32}
"""Likewise, on a side of a picture."""


class Pictures(Supervised):
    """Cross entropy on CIFAR-10, by whichever model the configuration names.

    Args:
        full: Which of `MODELS`.
        samples: Pictures to train on.
        valid: Pictures to validate on.
    """

    def __init__(self, full: bool, samples: int, valid: int) -> None:
        self.full, self.samples, self.valid = full, samples, valid

    def data(self, config):
        return self._part("train", self.samples), self._part("test", self.valid)

    def _part(self, name, count):
        x, y = made("tensors", name, range(count)).tensors
        return TensorDataset(F.avg_pool2d(x, x.shape[-1] // PIXELS[self.full]), y)

    def model(self, config):
        return MODELS[self.full][config["model"]]()

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
