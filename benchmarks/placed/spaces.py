"""Jobs of the placement benchmark: HyperSack's search spaces SP1 to SP4, reduced, and mixes of demands on CPU slots.

A job of a mix is bound by one of these:

- arithmetic  a small ResNet, whose convolutions keep a core busy
- memory      a wide perceptron with batches of four: each step streams 25 MB of weights, which no cache of a core holds
- input       a small perceptron whose samples come from slow storage, for which its core waits; a `time.sleep` in the
              data set stands for a network file system (`search_tasks/stored.py`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from models.resnet import resnet
from models.vit import Layer
from packs.pictures import CIFAR, made
from search_tasks.search import Supervised
from search_tasks.stored import Stored
from search_tasks.text import REVIEWS, WORDS, Causal, Reviews
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from placed.jobs import MODELS, PIXELS, Pictures

__all__ = ["BY_TRIAL", "EVERYTHING", "LANGUAGE_MODELS", "MIXES", "ONE_JOB", "PLAIN", "Jobs", "Mixed", "Words", "jobs"]

PLAIN, ONE_JOB, EVERYTHING, BY_TRIAL = "plain processes", "one job per device", "fusion + packing", "by trial"
"""Ways of getting jobs done."""
LANGUAGE_MODELS = {
    False: {"BERT-Tiny": (Layer, 64, 2, 2), "Pythia-14M": (Causal, 64, 3, 2), "Pythia-31M": (Causal, 96, 3, 4)},
    True: {"BERT-Tiny": (Layer, 128, 2, 2), "Pythia-14M": (Causal, 128, 6, 4), "Pythia-31M": (Causal, 256, 6, 8)},
}
"""By whether they have the published widths and depths, for a GPU: layer, width, depth and heads."""
BOUNDS = {"arithmetic": (32, 320, 64), "memory": (4, 32, 32), "input": (16, 200, 50)}
"""Bound of a training -> its batch size, and samples to train and to validate on."""
MIXES = {name: (name,) for name in BOUNDS} | {"mixed": tuple(BOUNDS)}
WAIT = 1e-3
"""Seconds for a sample from storage."""


class Words(nn.Module):
    """Scores two classes from the words and places of a review, by its first token or by its last one.

    Args:
        layer: `Layer`, in which all tokens attend to each other as in BERT, or `Causal`, as in Pythia.
        width: Width of a token.
        depth: Number of layers.
        heads: Heads of each layer.
        length: Words of a review.
    """

    def __init__(self, layer: type[Layer], width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, 2)
        self.read = -1 if issubclass(layer, Causal) else 0

    def forward(self, tokens):
        return self.classes(self.norm(self.layers(self.words(tokens) + self.places))[:, self.read])


class LanguageReviews(Reviews):
    """Whether a review praises a film, by whichever model the configuration names."""

    def __init__(self, full: bool, train: int, valid: int, length: int) -> None:
        super().__init__(CIFAR.parent / REVIEWS, train, valid, length)
        self.full = full

    def model(self, config):
        return Words(*LANGUAGE_MODELS[self.full][config["model"]], self.length)

    def scores(self, model, tokens):
        return model(tokens)


class Mixed(Supervised):
    """Classes of pictures of CIFAR-10, by a model and from a data set whose demand the configuration names.

    Args:
        part: Part of the samples that is used, for a quick run.
    """

    def __init__(self, part: float = 1.0) -> None:
        self.part = part

    def data(self, config):
        bound = config["bound"]
        _, train, valid = BOUNDS[bound]
        return self._part(bound, "train", train), self._part(bound, "test", valid)

    def _part(self, bound, name, count):
        count = max(8, int(self.part * count))
        x, y = made("tensors", name, range(count)).tensors
        samples = TensorDataset(x if bound == "memory" else F.avg_pool2d(x, x.shape[-1] // PIXELS[False]), y)
        return Stored(samples, count, WAIT) if bound == "input" else samples

    def model(self, config):
        if config["bound"] == "arithmetic":
            return resnet(8, (1, 1, 1))
        inputs, width = (3 * 32**2, 2048) if config["bound"] == "memory" else (3 * PIXELS[False] ** 2, 64)
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 10))

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def batch_size(self, config):
        return BOUNDS[config["bound"]][0]


@dataclass(frozen=True)
class Jobs:
    """All jobs of a search.

    Args:
        task: What to train.
        space: The jobs as a search space, every point of which is one.
        epochs: Epochs of each job.
        rows: Ways of getting them done that are compared, unless others are asked for.
        asked: Way -> its least speed-up over one job per device, on a GPU.
    """

    task: shoal.Task
    space: Mapping[str, Any]
    epochs: int
    rows: Sequence[str]
    asked: Mapping[str, float] = field(default_factory=dict)


def jobs(name: str, *, gpu: bool, quick: bool) -> Jobs:
    """Return the jobs of a search space, or of a mix, by name."""
    if name in MIXES:
        bounds = MIXES[name]
        rates = [1e-3 * 1.2**number for number in range((3 if quick else 12) // len(bounds))]
        space = {"lr": shoal.grid(rates), "bound": shoal.choice(bounds)}  # neighbours differ in what binds them
        return Jobs(Mixed(0.02 if quick else 1.0), space, 1 if quick else 10, (ONE_JOB, BY_TRIAL))
    models, batch_sizes, count = tuple(MODELS[gpu]), (64,) if gpu else (8, 32), 4 if gpu else 2
    least, task = 1e-5, Pictures(gpu, 2500 if gpu else 1200, 1000 if gpu else 200)
    if name == "sp2":
        models, batch_sizes, least = tuple(LANGUAGE_MODELS[gpu]), (8, 16, 32, 64), 5e-5
        task = LanguageReviews(gpu, 2000 if gpu else 800, 200, length=128 if gpu else 32)
    elif name == "sp3":
        models, batch_sizes, count = (models[4],), (8, 16, 32, 64), 6
    elif name == "sp4":
        count *= 2
    if quick:
        models, batch_sizes, count = ("BERT-Tiny",) if name == "sp2" else ("ViT", "ResNet-8"), batch_sizes[:1], 2
        task = LanguageReviews(False, 24, 8, length=8) if name == "sp2" else Pictures(False, 24, 8)
    space = {
        "model": shoal.choice(models),
        "batch_size": shoal.choice(batch_sizes),
        "lr": shoal.grid([least * 1e4 ** (number / (count - 1)) for number in range(count)]),
    }
    policies = ("wfd",) if name == "sp4" else ("ff", "wfd")
    asked = {"mps + ffd": 2.8, EVERYTHING: 6.0} if gpu else {}
    return Jobs(task, space, 1, (PLAIN, ONE_JOB, *policies, EVERYTHING), asked)
