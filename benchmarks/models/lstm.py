"""A language model of two LSTM layers (Zaremba et al., arXiv:1409.2329, without dropout)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["workload"]


class LanguageModel(nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.recurrent(self.embedding(tokens))[0])


def loss(net: nn.Module, batch: Batch) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(net(tokens).flatten(0, 1), following.flatten())


def adam(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-3 * factor)


def workload(full: bool) -> Workload:
    samples, length, width, words = (32, 35, 256, 10000) if full else (8, 16, 64, 1000)
    return Workload(
        name="LSTM",
        sizes=f"2 layers, d={width}, N={samples}, length {length}, {words} words, Adam",
        samples=samples,
        model=lambda: LanguageModel(words, width),
        batch=lambda: tuple(torch.randint(0, words, (samples, length)) for _ in range(2)),
        phases=(Phase(loss, adam),),
    )
