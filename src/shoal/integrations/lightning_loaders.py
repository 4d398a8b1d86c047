"""Loaders of a LightningDataModule, made once in a process for equal arguments."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.integrations.lightning_module import REMEDY, parameters_of

__all__ = ["LoaderPair", "Loaders"]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class LoaderPair:
    """The loaders of a data module.

    Args:
        train: Loader of the training set.
        valid: Loader of the validation set.
    """

    train: DataLoader[Any]
    valid: DataLoader[Any]


class Loaders:
    """Loaders of a data module by config.

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
        self._made: dict[str, LoaderPair] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": {}}

    def takes(self, name: str) -> bool:
        """Whether a name of the config is an argument of the data module."""
        return name in self.names or self._any_name

    def of(self, config: Config) -> LoaderPair:
        """The loaders of a config, of which only the arguments of the data module are read.

        Raises:
            TaskError: The data module defines a hook without an equal, or returns no DataLoader.
        """
        names = [*config] if self._any_name else self.names
        arguments = {name: config[name] for name in names if name in config}
        key = repr(arguments)
        if key not in self._made:
            self._made[key] = _loaded(self._given if self._is_made else self._given(**arguments))
        return self._made[key]


def _loaded(module: Any) -> LoaderPair:
    base = next((x for x in type(module).__mro__ if x.__name__ == "LightningDataModule"), None)
    wrong = [name for name in _HOOKS if base and getattr(type(module), name) is not getattr(base, name)]
    if wrong:
        raise TaskError(f"{type(module).__name__} defines {', '.join(wrong)}, which arrays do not call. {REMEDY}")
    module.prepare_data()
    module.setup("fit")
    return LoaderPair(
        _checked("train_dataloader", module.train_dataloader()), _checked("val_dataloader", module.val_dataloader())
    )


def _checked(name: str, loader: Any) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise TaskError(f"`{name}` must return one DataLoader, got {type(loader).__name__}. {REMEDY}")
    try:
        len(loader)
    except TypeError as error:
        raise TaskError(f"`{name}` has no length, as {error}; give its data set a `__len__`. {REMEDY}") from error
    return loader
