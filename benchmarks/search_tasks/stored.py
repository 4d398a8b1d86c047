"""Samples that come from slow storage.

A network file system takes about a millisecond to deliver a small file, in which the processor of the reader has
nothing to do. `time.sleep` stands for that wait: a real one would end with the first epoch, since the page cache keeps
small files. Each sample is augmented at random as it is read, so no epoch's samples can be kept for the next one.
Nobody reads ahead: a `DataLoader` with `num_workers`, or a task with `loader_workers`, would hide a part of the wait.
"""

import time

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

__all__ = ["Stored"]

NOISE = 0.02
"""Standard deviation of the noise that is added to each sample."""


class Stored(Dataset[tuple[Tensor, Tensor]]):
    """A data set, each sample of which comes after a wait, with a little noise.

    Args:
        samples: The data set: inputs and classes.
        count: Number of samples, the first ones.
        seconds: Wait for a sample.
    """

    def __init__(self, samples: TensorDataset, count: int, seconds: float) -> None:
        self.tensors = tuple(tensor[:count] for tensor in samples.tensors)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        x, y = (tensor[index] for tensor in self.tensors)
        return x + NOISE * torch.randn(x.shape), y
