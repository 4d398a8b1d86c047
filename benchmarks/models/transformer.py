"""A language model of two transformer layers (Vaswani et al., arXiv:1706.03762), sized for WikiText-2."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from models.workload import Phase, Workload, adadelta, cross_entropy, tokens

__all__ = ["workload"]

LENGTH = 32
WIDTH = 128
HEADS = 2
DROPOUT = 0.2


class LanguageModel(nn.Module):
    """Predicts each next token from those before it."""

    positions: Tensor
    mask: Tensor

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.decoder = nn.Linear(WIDTH, words)
        self.register_buffer("positions", sinusoids())
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) * math.sqrt(WIDTH) + self.positions)
        return self.decoder(self.encoder(x, self.mask, is_causal=True))


def sinusoids() -> Tensor:
    """Position p, pair i: sin and cos of p / 10000^(2i / d), [LENGTH, WIDTH]."""
    angles = torch.arange(LENGTH).unsqueeze(1) * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


def workload(full: bool) -> Workload:
    samples, words = (32, 33278) if full else (4, 1000)
    return Workload(
        sizes=f"2 layers, 2 heads, d={WIDTH}, N={samples}, length {LENGTH}, {words} words, Adadelta",
        samples=samples,
        model=partial(LanguageModel, words),
        batch=partial(tokens, samples, LENGTH, words),
        phases=(Phase(cross_entropy, adadelta),),
        draws=True,
    )
