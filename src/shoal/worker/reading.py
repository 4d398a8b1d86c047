"""A config that notes which of its values are read."""

import sys
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

__all__ = ["ReadConfig"]

_OWN_REFERENCES = 3
"""The variable of the caller of `read`, `self` in it, and the argument of `getrefcount`."""


class ReadConfig(dict[str, Any]):
    """A dict with the keys that were looked up, or all of them once it is walked through.

    A value that is itself a dict counts as read when it is taken out.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._original = dict(config)
        self._read: set[str] = set()

    def read(self) -> dict[str, Any]:
        """What was read so far, with the values before any change; all where somebody has kept it to read on later."""
        if sys.getrefcount(self) > _OWN_REFERENCES:
            self._read.update(self._original)
        return {key: self._original.get(key) for key in sorted(self._read)}

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of dict; a key that is absent counts as read."""
        self._read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """As of dict."""
        self._read.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As of dict."""
        self._read.add(key)
        return super().setdefault(key, default)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._read.update(super().keys())
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """As of dict."""
        self._read.update(super().keys())
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As of dict."""
        self._read.update(super().keys())
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As of dict."""
        self._read.update(super().keys())
        return super().items()
