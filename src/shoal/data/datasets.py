"""Data sets of a task: one copy for all trials whose configs agree in what `data` reads."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.data.batches import Batches
from shoal.data.tracked_config import values_read
from shoal.fuse.generators import reseed
from shoal.task import Task, call

__all__ = ["DataSets"]

KEPT = 8
"""Number of data sets that a process keeps: those loaded last."""


class DataSets:
    """Training and validation sets of a task's configs, each loaded once in this process."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._known: list[tuple[dict[str, Any], tuple[Batches, Batches]]] = []

    def of(self, config: Config) -> tuple[Batches, Batches]:
        """The training and validation set of a config; the same objects for configs with equal data."""
        return self._find(config)[1]

    def knows(self, config: Config) -> bool:
        """Whether the sets of a config are loaded."""
        return any(_agrees(config, read) for read, _ in self._known)

    def key(self, config: Config) -> tuple[object, ...]:
        """A key that differs between data sets: the task, the values that `data` read, and the sizes."""
        read, (train, valid) = self._find(config)
        kind = type(self._task)
        return (kind.__module__, kind.__qualname__, sorted(read.items()), train.samples, valid.samples)

    def _find(self, config: Config) -> tuple[dict[str, Any], tuple[Batches, Batches]]:
        for entry in self._known:
            if _agrees(config, entry[0]):
                return entry
        reseed(0, self._device)  # a random split is the same in every process, and after a resume
        sets, read = values_read(self._task.data, config)
        if not isinstance(sets, (tuple, list)) or len(sets) != 2:
            raise TaskError(f"the task's `data` must return a training and a validation set, got {type(sets).__name__}")
        shared = self._task.shared_augmentation
        collate = None if type(self._task).collate is Task.collate else self._collate
        batches = (
            Batches(sets[0], self._device, "training", shared, collate),
            Batches(sets[1], self._device, "validation", shared, collate),
        )
        self._known = [*self._known[1 - KEPT :], (read, batches)]
        return self._known[-1]

    def _collate(self, samples: list[Any]) -> Any:
        batch = call(self._task, "collate", samples)
        if isinstance(batch, Mapping) and not isinstance(batch, dict):  # such as a tokenizer's `BatchEncoding`
            batch = dict(batch)
        if not any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in pytree.tree_leaves(batch)):
            raise TaskError(
                "the task's `collate` must return a tensor whose first axis counts samples, or a list or dict of such, "
                f"got {type(batch).__name__} without any; pad what is ragged, for example by pad_sequence"
            )
        return batch


def _agrees(config: Config, read: Mapping[str, Any]) -> bool:
    return all(config.get(key) == value for key, value in read.items())
