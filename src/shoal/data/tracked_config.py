"""Configs that track reads of their values: to record them, or to refuse values that differ between members."""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeVar

from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["MembersConfig", "values_read"]

T = TypeVar("T")


class _ObservedConfig(ABC, dict[str, Any]):
    """A dict that calls a method before each read of its keys."""

    @abstractmethod
    def _look_up(self, key: str) -> None:
        """Called before a key is read, present or not."""

    @abstractmethod
    def _look_through(self) -> None:
        """Called before all keys and values are read."""

    def __getitem__(self, key: str) -> Any:
        self._look_up(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of dict; a key that is absent counts as read."""
        self._look_up(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """As of dict."""
        self._look_up(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As of dict."""
        self._look_up(key)
        return super().setdefault(key, default)

    def __contains__(self, key: object) -> bool:
        self._look_up(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._look_through()
        return super().__iter__()

    def __len__(self) -> int:
        self._look_through()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._look_through()
        return super().__eq__(other)

    __hash__ = None

    def __repr__(self) -> str:
        self._look_through()
        return super().__repr__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """As of dict."""
        self._look_through()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As of dict."""
        self._look_through()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As of dict."""
        self._look_through()
        return super().items()


def values_read(function: Callable[[dict[str, Any]], T], config: Mapping[str, Any]) -> tuple[T, dict[str, Any]]:
    """Call a function of a config, and find out which of the config's values it reads.

    Args:
        function: Function of a config. It gets a copy, which it may change.
        config: Config, nested as its space. A value that is a dict counts as read once it is taken out.

    Returns:
        The function's result. Name -> value of all names that it read, with None for absent names. These are all values
        if it iterated over the config, or if something keeps the config and may read it later.
    """
    given = _RecordingConfig(config)
    names, kept = given.names, weakref.ref(given)
    result = function(given)
    del given
    if kept() is not None:
        names.update(config)
    return result, {name: config.get(name) for name in sorted(names)}


class _RecordingConfig(_ObservedConfig):
    """A copy of a config that records which names are read: all of them once it is iterated over."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(copy.deepcopy(dict(config)))
        self.names: set[str] = set()

    def _look_up(self, key: str) -> None:
        self.names.add(key)

    def _look_through(self) -> None:
        self.names.update(dict.keys(self))


class MembersConfig(_ObservedConfig):
    """The configs of an array's members as one, for a step of all members at once.

    Equal values are unchanged, and floats that differ between members become one stacked value. Reading any other value
    that differs (an integer, a boolean, a string, a list, a key that only some have) raises `NeedsMemberError`.

    Args:
        configs: Configs of the members.
        path: Path of these dicts within the config, for messages.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], path: str = "") -> None:
        super().__init__()
        self._differing: dict[str, str] = {}  # key -> why it cannot be read
        for key in dict.fromkeys(key for config in configs for key in config):
            name = f"{path}{key}"
            if not all(key in config for config in configs):
                self._differing[key] = f"only some members' configs have {name!r}"
                continue
            column = [config[key] for config in configs]
            if all(isinstance(value, Mapping) for value in column):
                self[key] = MembersConfig(column, f"{name}.")
            elif all(type(value) is type(column[0]) and value == column[0] for value in column):
                self[key] = copy.deepcopy(column[0])
            elif all(type(value) is float for value in column):
                self[key] = Stacked.of_floats(tuple(column))
            else:
                self._differing[key] = f"{name!r} differs between the members' configs and is no float in all"

    def __deepcopy__(self, memo: dict[int, Any]) -> "MembersConfig":
        """A copy that may be changed. Stacked floats are never changed in place, and are shared."""
        other = MembersConfig(())
        other._differing = self._differing
        for key, value in dict.items(self):
            other[key] = value if isinstance(value, Stacked) else copy.deepcopy(value, memo)
        return other

    def _look_up(self, key: str) -> None:
        if key in self._differing:
            raise NeedsMemberError(self._differing[key])

    def _look_through(self) -> None:
        for reason in self._differing.values():
            raise NeedsMemberError(reason)
