"""Batches of a data set in a given order, as a plain PyTorch program makes them."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

__all__ = ["FEEDS", "Feed", "Given", "indexed", "kindest", "loaded"]

Feed = Callable[[Dataset[Any], int, Tensor], Iterator[list[Tensor]]]
"""Data set, batch size, indices of samples in order -> batches."""


class Given(Sampler[int]):
    """Samples in the order of their indices, int64 [samples]."""

    def __init__(self, order: Tensor) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())


def loaded(dataset: Dataset[Any], size: int, order: Tensor) -> Iterator[list[Tensor]]:
    """Through a `DataLoader` in this process."""
    return iter(DataLoader(dataset, batch_size=size, sampler=Given(order)))


def indexed(dataset: Dataset[Any], size: int, order: Tensor) -> Iterator[list[Tensor]]:
    """Taken out of the tensors of a `TensorDataset` at once."""
    if not isinstance(dataset, TensorDataset):
        raise TypeError(f"only a TensorDataset can be indexed as a whole, got {type(dataset).__name__}; use `loaded`")
    for part in order.split(size):
        yield [tensor[part] for tensor in dataset.tensors]


def kindest(pipeline: str) -> Feed:
    """The faster one of those that can be had."""
    return indexed if pipeline == "tensors" else loaded


FEEDS: dict[str, Feed] = {"DataLoader": loaded, "indexed": indexed}
