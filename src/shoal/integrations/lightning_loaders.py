"""Loaders of a LightningDataModule, as data sets of a study."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.integrations.lightning_module import REMEDY, parameters_of

__all__ = ["LoadedData", "Loaders"]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class LoadedData:
    """What the loaders of a data module hold.

    Args:
        datasets: Training and validation set.
        batch_size: Samples of a training batch.
        eval_batch_size: Samples of a validation batch.
        collate: Makes a batch of samples.
    """

    datasets: tuple[Dataset[Any], Dataset[Any]]
    batch_size: int
    eval_batch_size: int
    collate: Callable[[list[Any]], Any]

    @property
    def train_batches(self) -> int:
        """Training batches of an epoch."""
        return math.ceil(len(self.datasets[0]) / self.batch_size)  # type: ignore[arg-type]


class Loaders:
    """Loaders of a data module, made once in a process for equal arguments.

    Args:
        given: LightningDataModule, or its class, or a function that returns one.

    Raises:
        TaskError: The value is none of these.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._is_made = not isinstance(given, type) and hasattr(given, "train_dataloader")
        if not self._is_made and not callable(given):
            raise TaskError(f"`datamodule` must be a LightningDataModule, or its class, got {given!r}")
        self.names, self._any_name = ([], False) if self._is_made else parameters_of(given)
        self._made: dict[str, LoadedData] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": {}}

    def takes(self, name: str) -> bool:
        """Whether a name of the config is an argument of the data module."""
        return name in self.names or self._any_name

    def of(self, config: Config) -> LoadedData:
        """The loaders of a config, of which only the arguments of the data module are read.

        Raises:
            TaskError: A loader cannot be honoured.
        """
        names = [*config] if self._any_name else self.names
        arguments = {name: config[name] for name in names if name in config}
        key = repr(arguments)
        if key not in self._made:
            self._made[key] = _loaded(self._given if self._is_made else self._given(**arguments))
        return self._made[key]

    def collate(self, samples: list[Any]) -> Any:
        """The batch of some samples."""
        return next(iter(self._made.values())).collate(samples)


def _loaded(module: Any) -> LoadedData:
    base = next((x for x in type(module).__mro__ if x.__name__ == "LightningDataModule"), None)
    wrong = [name for name in _HOOKS if base and getattr(type(module), name) is not getattr(base, name)]
    if wrong:
        raise TaskError(f"{type(module).__name__} defines {', '.join(wrong)}, which arrays do not call. {REMEDY}")
    module.prepare_data()
    module.setup("fit")
    train = _checked("train_dataloader", module.train_dataloader())
    valid = _checked("val_dataloader", module.val_dataloader())
    if not isinstance(train.sampler, RandomSampler) or train.sampler.replacement:
        raise TaskError(
            "`train_dataloader` must return a DataLoader with shuffle=True, since the study determines the order of "
            f"samples, got {type(train.sampler).__name__}. {REMEDY}"
        )
    if not isinstance(valid.sampler, SequentialSampler):
        raise TaskError(f"`val_dataloader` must return a DataLoader without shuffling or a sampler. {REMEDY}")
    if train.drop_last and len(train.dataset) % train.batch_size:
        raise TaskError("`train_dataloader` has drop_last=True, but a study keeps the last batch; set it to False")
    if getattr(train.collate_fn, "__code__", train.collate_fn) != getattr(
        valid.collate_fn, "__code__", valid.collate_fn
    ):
        raise TaskError("`collate_fn` of `train_dataloader` and `val_dataloader` differ; give both the same function")
    return LoadedData((train.dataset, valid.dataset), train.batch_size, valid.batch_size, train.collate_fn)


def _checked(name: str, loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        raise TaskError(f"`{name}` must return one DataLoader, got {type(loader).__name__}. {REMEDY}")
    if isinstance(loader.dataset, IterableDataset):
        raise TaskError(f"`{name}` has an iterable data set; it needs one with a length and indices. {REMEDY}")
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise TaskError(f"`{name}` has a batch sampler of its own; give it a `batch_size`. {REMEDY}")
    return loader
