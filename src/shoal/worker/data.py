"""Data sets as batches on a device: one copy for all trials that read the same of their config."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from shoal.errors import TaskError
from shoal.task import Task
from shoal.trial import Config, derive_seed
from shoal.worker.learner import reseed
from shoal.worker.reading import ReadConfig

__all__ = ["Batches", "DataSets", "epoch_order"]

RESIDENT_BYTES = 1 << 30
"""A tensor data set up to this size is kept on the device as a whole."""

KEPT = 8
"""Data sets that a process keeps, those loaded last."""


def epoch_order(samples: int, data_seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the training set, int64 [samples].

    Args:
        samples: size of the training set.
        data_seed: of the trial.
        epoch: epochs finished before this one.
    """
    generator = torch.Generator().manual_seed(derive_seed(data_seed, "epoch", epoch))
    return torch.randperm(samples, generator=generator)


class Batches:
    """A data set, cut into batches on a device.

    Tensor data sets move to the device at once where they are small, and a batch is one indexing; of any other data set
    the samples are fetched one by one and collated.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, name: str) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TaskError(f"the {name} set must have a length and indices, got {type(dataset).__name__}")
        self.samples = len(dataset)
        if self.samples == 0:
            raise TaskError(f"the {name} set is empty")
        self._dataset = dataset
        self._device = device
        self._resident: list[Tensor] | None = None
        tensors = _tensors(dataset)
        if tensors is not None and sum(tensor.nbytes for tensor in tensors) <= RESIDENT_BYTES:
            self._resident = [tensor.to(device) for tensor in tensors]

    def steps(self, batch_size: int) -> int:
        """Batches of one pass."""
        return math.ceil(self.samples / batch_size)

    def walk(
        self, batch_size: int, order: Tensor | None = None, first: int = 0, seed: int | None = None
    ) -> Iterator[Any]:
        """One pass.

        Args:
            batch_size: of all batches but perhaps the last.
            order: indices of the samples, int64 [samples]; as they are by default.
            first: number of the first batch to give; those before are skipped unread.
            seed: the generators of Python, NumPy and torch are seeded with it plus the batch's number before each is
                fetched, so that what data sets and user code draw does not depend on what was drawn before.
        """
        if order is not None and self._resident is not None:
            order = order.to(self._device)
        for number in range(first, self.steps(batch_size)):
            if seed is not None:
                reseed(seed + number, self._device)
            yield self._batch(slice(number * batch_size, (number + 1) * batch_size), order)

    def _batch(self, part: slice, order: Tensor | None) -> Any:
        if self._resident is not None:
            # A batch is its user's own: what is done to it in place must not reach the data.
            return [t[part].clone() if order is None else t.index_select(0, order[part]) for t in self._resident]
        indices = range(self.samples)[part] if order is None else order[part].tolist()
        return pytree.tree_map(self._move, default_collate([self._dataset[i] for i in indices]))

    def _move(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value


class DataSets:
    """The training and validation sets of a task's configurations, each loaded once in this process."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._known: list[tuple[dict[str, Any], tuple[Batches, Batches]]] = []

    def of(self, config: Config) -> tuple[Batches, Batches]:
        """The sets of a configuration; the same objects for all that `data` does not tell apart."""
        return self._find(config)[1]

    def knows(self, config: Config) -> bool:
        """Whether the sets of a configuration are loaded."""
        return any(_agrees(config, read) for read, _ in self._known)

    def key(self, config: Config) -> tuple[object, ...]:
        """What tells the data sets of configurations apart: the task, what `data` read, and the sets' sizes."""
        read, (train, valid) = self._find(config)
        kind = type(self._task)
        return (kind.__module__, kind.__qualname__, sorted(read.items()), train.samples, valid.samples)

    def _find(self, config: Config) -> tuple[dict[str, Any], tuple[Batches, Batches]]:
        for entry in self._known:
            if _agrees(config, entry[0]):
                return entry
        reading = ReadConfig(config)
        reseed(0, self._device)  # a random split is the same one in every process, and after a resume
        sets = self._task.data(reading)
        if not isinstance(sets, (tuple, list)) or len(sets) != 2:
            raise TaskError(f"the task's `data` must return a training and a validation set, got {type(sets).__name__}")
        batches = (Batches(sets[0], self._device, "training"), Batches(sets[1], self._device, "validation"))
        self._known = [*self._known[1 - KEPT :], (reading.read(), batches)]
        return self._known[-1]


def _agrees(config: Config, read: Mapping[str, Any]) -> bool:
    return all(config.get(key) == value for key, value in read.items())


def _tensors(dataset: Dataset[Any]) -> list[Tensor] | None:
    """The data of a `TensorDataset`, or of a part of one as `random_split` makes it; None of anything else."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is Subset and (whole := _tensors(dataset.dataset)) is not None:
        return [tensor[torch.as_tensor(dataset.indices)] for tensor in whole]
    return None
