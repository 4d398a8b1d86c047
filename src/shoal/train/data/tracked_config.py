"""Configs that track reads of their values, to record the reads or to refuse values that differ between members."""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeVar

from shoal.core.names import explain_missing_name
from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["MembersConfig", "config_matches", "values_read"]

T = TypeVar("T")


class _ObservedConfig(ABC, dict[str, Any]):
    """Dict that calls a method before each read."""

    @abstractmethod
    def _before_read(self, key: str) -> None:
        """Handle a read of one key, which may be absent."""

    @abstractmethod
    def _before_read_all(self) -> None:
        """Handle a read of all keys and values."""

    def __getitem__(self, key: str) -> Any:
        self._before_read(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`; an absent key counts as read, too."""
        self._before_read(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._before_read(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._before_read(key)
        return super().setdefault(key, default)

    def __contains__(self, key: object) -> bool:
        self._before_read(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._before_read_all()
        return super().__iter__()

    def __bool__(self) -> bool:
        """As of a dict; `config or {...}` reads no value, and all configs of a space agree in it."""
        return super().__len__() > 0

    def __len__(self) -> int:
        self._before_read_all()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._before_read_all()
        return super().__eq__(other)

    __hash__ = None

    def __repr__(self) -> str:
        self._before_read_all()
        return super().__repr__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self._before_read_all()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._before_read_all()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._before_read_all()
        return super().items()


def values_read(function: Callable[[dict[str, Any]], T], config: Mapping[str, Any]) -> tuple[T, dict[str, Any]]:
    """Call a function of a copy of a config; return its result, and name -> value of what it read (None: absent).

    A nested dict counts as read as a whole once it is accessed. All names are returned if it iterated over the config,
    or if the config is still referenced and may be read later.
    """
    given = _RecordingConfig(config)
    names, kept = given.names, weakref.ref(given)
    try:
        result = function(given)
    except KeyError as error:
        explain_missing_name(error, given)
        raise
    del given
    if kept() is not None:
        names.update(config)
    return result, {name: config.get(name) for name in sorted(names)}


def config_matches(config: Mapping[str, Any], read: Mapping[str, Any]) -> bool:
    """Return whether a config has the values that `values_read` returned."""
    return all(config.get(key) == value for key, value in read.items())


class _RecordingConfig(_ObservedConfig):
    """Copy of a config that records which names are read. Iterating over it counts as reading all names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(copy.deepcopy(dict(config)))
        self.names: set[str] = set()

    def _before_read(self, key: str) -> None:
        self.names.add(key)

    def _before_read_all(self) -> None:
        self.names.update(dict.keys(self))


class MembersConfig(_ObservedConfig):
    """Combined config of all members of an array, for a step of all members at once.

    Equal values are unchanged, and floats that differ between members become one stacked value. Reading any other value
    that differs (an integer, a boolean, a string, a list, a key that some members lack) raises `NeedsMemberError`.
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
                self._differing[key] = f"{name!r} differs between the members' configs and is not a float in all"

    def __deepcopy__(self, memo: dict[int, Any]) -> "MembersConfig":
        """Return a copy that may be changed. Stacked floats are shared, since they are never changed in place."""
        other = MembersConfig(())
        other._differing = self._differing
        for key, value in dict.items(self):
            other[key] = value if isinstance(value, Stacked) else copy.deepcopy(value, memo)
        return other

    def _before_read(self, key: str) -> None:
        if key in self._differing:
            raise NeedsMemberError(self._differing[key])

    def _before_read_all(self) -> None:
        for reason in self._differing.values():
            raise NeedsMemberError(reason)
