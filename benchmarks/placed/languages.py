"""The language models of HyperSack's search space SP2, as token models of plain PyTorch, on reviews of IMDB."""

from collections.abc import Callable

import torch
from models.vit import Layer
from packs.pictures import CIFAR
from search_tasks.text import REVIEWS, WORDS, Causal, Reviews
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.trial import Config

__all__ = ["LANGUAGE_MODELS", "LanguageReviews"]


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

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classes(self.norm(self.layers(self.words(tokens) + self.places))[:, self.read])


LANGUAGE_MODELS: dict[bool, dict[str, Callable[[int], nn.Module]]] = {
    False: {
        "BERT-Tiny": lambda length: Words(Layer, 64, 2, 2, length),
        "Pythia-14M": lambda length: Words(Causal, 64, 3, 2, length),
        "Pythia-31M": lambda length: Words(Causal, 96, 3, 4, length),
    },
    True: {
        "BERT-Tiny": lambda length: Words(Layer, 128, 2, 2, length),
        "Pythia-14M": lambda length: Words(Causal, 128, 6, 4, length),
        "Pythia-31M": lambda length: Words(Causal, 256, 6, 8, length),
    },
}
"""By whether they have the published widths and depths, for a GPU; else they are smaller, for a core of a CPU."""


class LanguageReviews(Reviews):
    """Whether a review praises a film, by whichever model the configuration names."""

    def __init__(self, full: bool, train: int, valid: int, length: int) -> None:
        super().__init__(CIFAR.parent / REVIEWS, train, valid, length)
        self.full = full

    def model(self, config: Config) -> nn.Module:
        return LANGUAGE_MODELS[self.full][config["model"]](self.length)

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"])

    def scores(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens)
