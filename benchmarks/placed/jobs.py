"""Jobs like those of HyperSack's first search space: six vision models, four batch sizes, four learning rates."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from shoal.core.space import Space
from shoal.core.trial import Config

__all__ = ["FULL", "QUICK", "SMALL", "Pictures", "Sizes", "configs", "space"]

RATES = (1e-5, 1e-1)
"""Least and largest, as HyperSack has them; those between are evenly spaced in their logarithm."""


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
        batch_sizes: samples per step.
        rates: how many learning rates there are.
        samples: to train on.
        valid: to validate on.
        epochs: of each job.
    """

    full: bool
    models: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    rates: int
    samples: int
    valid: int
    epochs: int

    @property
    def pixels(self) -> int:
        """On a side of a picture."""
        return 32 if self.full else 16

    @property
    def jobs(self) -> int:
        """How many there are."""
        return len(self.models) * len(self.batch_sizes) * self.rates

    def with_jobs(self, jobs: int) -> "Sizes":
        """As many learning rates as it takes.

        Raises:
            ValueError: there cannot be so many jobs.
        """
        each = len(self.models) * len(self.batch_sizes)
        if jobs < each or jobs % each:
            raise ValueError(
                f"must be a multiple of {each} ({len(self.models)} models x {len(self.batch_sizes)} batch sizes), "
                f"got {jobs}"
            )
        return replace(self, rates=jobs // each)

    def changed(self, *, samples: int | None, epochs: int | None) -> "Sizes":
        """Other numbers, where there are any."""
        return replace(self, samples=samples or self.samples, epochs=epochs or self.epochs)


SMALL = Sizes(False, tuple(MODELS[False]), (4, 8, 16, 32), rates=4, samples=2000, valid=200, epochs=1)
FULL = Sizes(True, tuple(MODELS[True]), (64, 128, 256, 512), rates=4, samples=5000, valid=1000, epochs=3)
QUICK = Sizes(False, ("ViT", "ResNet-8"), (8,), rates=2, samples=24, valid=8, epochs=1)


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


def space(sizes: Sizes) -> dict[str, Any]:
    """All jobs as a search space."""
    least, largest = RATES
    steps = max(1, sizes.rates - 1)
    return {
        "model": shoal.choice(sizes.models),
        "batch_size": shoal.choice(sizes.batch_sizes),
        "lr": shoal.grid([least * (largest / least) ** (number / steps) for number in range(sizes.rates)]),
    }


def configs(sizes: Sizes) -> list[dict[str, Any]]:
    """All jobs as a list."""
    return Space(space(sizes)).grid()
