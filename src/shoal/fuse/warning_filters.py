"""Warnings of torch that have nothing to say to the user, hidden while any thread does what they warn of.

Python keeps one list of filters for all threads. `warnings.catch_warnings` puts back the list of when it was entered:
of two threads the one that leaves last would leave the other's filter in it for good.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

__all__ = ["HiddenWarning"]


@dataclass(eq=False)
class HiddenWarning:
    """A warning that is hidden within; the first thread to enter adds a filter, and the last one takes it away.

    Args:
        message: how it begins, a regular expression.
    """

    message: str

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._within = 0
        self._filter: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hide it."""
        with self._lock:
            self._within += 1
            if self._within == 1:
                warnings.filterwarnings("ignore", self.message, UserWarning)
                self._filter = warnings.filters[0]
        try:
            yield
        finally:
            with self._lock:
                self._within -= 1
                if self._within == 0 and self._filter in warnings.filters:  # else someone has put back another list
                    warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
