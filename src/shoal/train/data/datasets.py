"""Data sets of a task: one copy for all trials whose configs agree in the values that `data` reads."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.activity import Activity
from shoal.core.errors import TaskError
from shoal.core.plain import plain
from shoal.core.trial import Config
from shoal.fuse.generators import seed_all
from shoal.host.activity_clock import during
from shoal.task import Task, call
from shoal.train.data.batches import Batches
from shoal.train.data.loader import LoaderSettings, parse_loader
from shoal.train.data.tracked_config import config_matches, values_read

__all__ = ["DataSets"]

MAX_CACHED = 8
"""Maximum number of data sets that a process keeps; the one loaded first is dropped."""


class DataSets:
    """Cache of the training and validation sets of a task's configs. Each is loaded once in this process."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self.device = device
        self._known: list[tuple[dict[str, Any], tuple[Batches, Batches]]] = []
        self.sources: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Data sets that `data` returned, and those that they are made of."""

    def of(self, config: Config) -> tuple[Batches, Batches]:
        """Return the training and the validation set of a config; configs with equal data get the same objects."""
        return self._find(config)[1]

    def is_loaded(self, config: Config) -> bool:
        """Return whether the sets of a config are loaded."""
        return any(config_matches(config, read) for read, _ in self._known)

    def names_read(self, config: Config) -> frozenset[str]:
        """Return the names of the config that `data` read."""
        return frozenset(self._find(config)[0])

    def key(self, config: Config) -> tuple[object, ...]:
        """Return a key that differs between data sets: the task, what `data` read, and numbers of samples."""
        read, (train, valid) = self._find(config)
        kind = type(self._task)
        return (kind.__module__, kind.__qualname__, sorted(read.items()), train.samples, valid.samples)

    def _find(self, config: Config) -> tuple[dict[str, Any], tuple[Batches, Batches]]:
        for entry in self._known:
            if config_matches(config, entry[0]):
                return entry
        with during(Activity.DATA):
            return self._load(config)

    def _load(self, config: Config) -> tuple[dict[str, Any], tuple[Batches, Batches]]:
        seed_all(0, self.device)  # so a random split is the same in every process, and after a resume
        sets, read = values_read(self._task.data, config)
        if not isinstance(sets, (tuple, list)) or len(sets) != 2:
            raise TaskError(f"the task's `data` must return a training and a validation set, got {type(sets).__name__}")
        batches = self._batches(sets[0], "training"), self._batches(sets[1], "validation")
        if batches[1].endless:
            raise TaskError(
                "the validation set is iterable and has no length, so the end of a validation is unknown; give it a "
                "`__len__` that returns the number of samples of a pass, or return a list of its samples"
            )
        self._known = [*self._known[1 - MAX_CACHED :], (read, batches)]
        return self._known[-1]

    def _batches(self, returned: Any, name: str) -> Batches:
        dataset, collate, settings = parse_loader(returned, name, _check_workers(self._task))
        self._add_sources(dataset)
        if type(self._task).collate is not Task.collate:
            if collate is not None:
                raise TaskError(
                    f"the {name} loader has a `collate_fn` ({_name(collate)}), and the task overrides `collate`; "
                    "keep one of them"
                )
            return self._make_batches(
                dataset, name, partial(call, self._task, "collate"), "the task's `collate`", settings
            )
        return self._make_batches(dataset, name, collate, f"the `collate_fn` of the {name} loader", settings)

    def _add_sources(self, dataset: Any) -> None:
        """Note a data set, and those in its attributes, in lists and dicts among these, at any depth."""
        if not isinstance(dataset, Dataset) or dataset in self.sources:
            return
        self.sources[dataset] = None
        for value in vars(dataset).values():
            held = list(value.values()) if isinstance(value, dict) else value
            several = isinstance(held, (list, tuple)) and held and isinstance(held[0], Dataset)
            for each in held if several else (held,):
                self._add_sources(each)

    def _make_batches(
        self, dataset: Any, name: str, collate: Callable[[list[Any]], Any] | None, whose: str, settings: LoaderSettings
    ) -> Batches:
        checked = None if collate is None else partial(_call_collate, collate, whose)
        return Batches(dataset, self.device, name, self._task.shared_augmentation, checked, settings)


def _call_collate(collate: Callable[[list[Any]], Any], whose: str, samples: list[Any]) -> Any:
    batch = collate(samples)
    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # such as a tokenizer's `BatchEncoding`
        batch = dict(batch)
    if not any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in pytree.tree_leaves(batch)):
        raise TaskError(
            f"{whose} must return a tensor whose first axis counts samples, or a list or dict of such, "
            f"got {type(batch).__name__} without any; pad what is ragged, for example by pad_sequence"
        )
    return batch


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_workers(task: Task) -> int:
    workers: Any = plain(task.loader_workers)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
        raise TaskError(f"`loader_workers` of a task must be an integer of at least 0, got {workers!r}")
    return workers
