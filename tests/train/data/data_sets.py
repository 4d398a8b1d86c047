"""Data sets that count how often each sample is requested, and helpers that collect batches."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

CPU = torch.device("cpu")


class Counting(Dataset[Any]):
    """Makes samples by a function of the index, and counts how often each was requested."""

    def __init__(self, make: Callable[[int], Any], samples: int = 300) -> None:
        self.make = make
        self.samples = samples
        self.asked: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.asked[index] += 1
        return self.make(index)


def picture(index: int) -> tuple[Tensor, int]:
    return torch.arange(6).reshape(2, 3) + index / 7, index


def augmented(index: int) -> Tensor:
    """Return a sample with draws from all generators that users draw from."""
    drawn = [torch.rand(()).item(), random.random(), np.random.random()]
    return torch.tensor([index, *drawn], dtype=torch.float64)


def named(index: int) -> dict[str, Any]:
    return {"x": picture(index)[0], "name": f"sample {index}"}


def lockstep(walks: Iterable[Any], sizes: Iterable[int], samples: int) -> list[list[Any]]:
    """Return the batches of several iterators, of which the one furthest behind always advances."""
    walks, sizes = [iter(walk) for walk in walks], list(sizes)
    made: list[list[Any]] = [[] for _ in walks]
    while True:
        behind = min(range(len(walks)), key=lambda lane: len(made[lane]) * sizes[lane])
        if len(made[behind]) * sizes[behind] >= samples:
            break
        made[behind].append(next(walks[behind]))
    for walk in walks:
        assert next(walk, None) is None
    return made


def drawn() -> tuple[float, float, float]:
    """Return the numbers that user code would draw now."""
    return torch.rand(()).item(), random.random(), np.random.random()
