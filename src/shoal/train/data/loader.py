"""Parses a `DataLoader` that a task's `data` returned into its data set, its collate function and its settings."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shoal.core.errors import TaskError
from shoal.core.trial import derive_seed
from shoal.fuse.generators import PythonRngSnapshot, forked_rng, seed_all

__all__ = ["LoaderSettings", "augmentation_seed", "epoch_order", "is_iterable", "parse_loader"]

Collate = Callable[[list[Any]], Any]


def epoch_order(samples: int, data_seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch, counted from 0, visits a shuffled training set, int64 [samples]."""
    generator = torch.Generator().manual_seed(derive_seed(data_seed, "epoch", epoch))
    return torch.randperm(samples, generator=generator)


def augmentation_seed(data_seed: int, epoch: int | None) -> int:
    """Return the seed for draws of samples in an epoch; the validation set (None) has the same ones at each."""
    return derive_seed(data_seed, "valid") if epoch is None else derive_seed(data_seed, "noise", epoch)


@dataclass(frozen=True)
class LoaderSettings:
    """Settings with which a data set is read.

    Args:
        order: "shuffled" (by the data seed at each epoch), "ascending", or a sampler that is iterated once per epoch.
        batch_size: Samples of a batch; None if the task's `batch_size` determines it.
        num_workers: Number of loader processes; 0 to fetch samples in the training process.
        prefetch_factor: Number of units (batches, or blocks of samples) that each loader process fetches in advance.
        worker_init_fn: Function that each loader process calls with its number at its start, or None.
    """

    order: Any | Literal["shuffled", "ascending"] = "shuffled"
    batch_size: int | None = None
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int = 2
    worker_init_fn: Callable[[int], None] | None = None

    def samples(self, dataset: Any) -> int:
        """Return the number of samples of an epoch: the length of the sampler if there is one, else of the data set."""
        return len(dataset) if isinstance(self.order, str) else len(self.order)

    def indices(self, samples: int, data_seed: int, epoch: int | None) -> Tensor | None:
        """Return the order of an epoch (None: of the validation set), int64 [samples]; None if it ascends over all.

        Before a sampler is iterated, the generators of torch, Python and NumPy and its own `generator` are seeded with
        the data seed and the epoch, and its `set_epoch`, if it has one, is called.
        """
        if self.order == "ascending":
            return None
        if self.order == "shuffled":
            return None if epoch is None else epoch_order(samples, data_seed, epoch)
        seed = derive_seed(data_seed, "valid order") if epoch is None else derive_seed(data_seed, "epoch", epoch)
        return _sampler_indices(self.order, seed, epoch or 0, samples)


def _sampler_indices(sampler: Any, seed: int, epoch: int, samples: int) -> Tensor:
    """Return the indices of a sampler; all generators are restored."""
    others = PythonRngSnapshot()
    with forked_rng([]):
        try:
            seed_all(seed, torch.device("cpu"))
            if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
                own.manual_seed(seed)
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
            indices = list(sampler)
        finally:
            others.restore()
    name = type(sampler).__name__
    if len(indices) != samples:
        raise TaskError(
            f"the sampler {name} of the task's `DataLoader` yields {len(indices)} indices, and its length is "
            f"{samples}; all epochs must have the number of samples that its `__len__` returns"
        )
    try:
        return torch.tensor([index(each) for each in indices], dtype=torch.int64, device="cpu")
    except TypeError as error:
        raise TaskError(f"the sampler {name} of the task's `DataLoader` must yield integers: {error}") from error


def parse_loader(returned: Any, name: str, num_workers: int = 0) -> tuple[Dataset[Any], Collate | None, LoaderSettings]:
    """Split a data set or `DataLoader` of a task into data set, collate function (None: torch's) and settings.

    `num_workers` counts for a plain data set; settings that a study does not support are refused.
    """
    if not isinstance(returned, DataLoader):
        _check_workers(returned, name, num_workers)
        return returned, None, LoaderSettings(num_workers=num_workers)
    if type(returned).__iter__ is not DataLoader.__iter__:
        raise TaskError(
            f"the {name} loader is a {type(returned).__name__}, which iterates in its own way; "
            "return a plain torch.utils.data.DataLoader, or the data set"
        )
    _check_workers(returned.dataset, name, returned.num_workers)
    if returned.batch_size is None:
        sampler = returned.batch_sampler
        what = "no batch size" if sampler is None else f"a batch sampler ({type(sampler).__name__})"
        raise TaskError(
            f"the {name} loader has {what}, and a study cuts the batches of all trials itself; make the DataLoader "
            "with `batch_size`, `sampler` (or `shuffle`) and `drop_last` instead"
        )
    return (
        returned.dataset,
        None if returned.collate_fn is default_collate else returned.collate_fn,
        LoaderSettings(
            "ascending" if is_iterable(returned.dataset) else _order(returned, name),
            returned.batch_size,
            returned.drop_last,
            returned.num_workers,
            returned.prefetch_factor or 2,
            returned.worker_init_fn,
        ),
    )


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set has no indices, so that each pass iterates over it."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__next__")


def _check_workers(dataset: Any, name: str, num_workers: int) -> None:
    if num_workers and is_iterable(dataset):
        raise TaskError(
            f"the {name} set is iterable ({type(dataset).__name__}), and {num_workers} loader processes would yield "
            "its samples in an order of their own; set `num_workers` of its DataLoader, or `loader_workers` of the "
            "task, to 0, or return a data set with `__len__` and `__getitem__`"
        )


def _order(loader: DataLoader[Any], name: str) -> Any:
    sampler = loader.sampler
    if not hasattr(sampler, "__len__"):
        raise TaskError(
            f"the sampler {type(sampler).__name__} of the {name} loader has no length; give it a `__len__` that "
            "returns the number of samples of an epoch"
        )
    whole = len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if whole and type(sampler) is SequentialSampler:
        return "ascending"
    if whole and type(sampler) is RandomSampler and not sampler.replacement:
        return "shuffled"
    return sampler
