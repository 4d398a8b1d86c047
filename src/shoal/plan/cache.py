"""Cache of values that one plan has computed, for the next plans."""

from collections import defaultdict
from typing import Any

__all__ = ["PlanCache"]


class PlanCache:
    """Caches values across plans, by name of a table. `refresh` clears it when what the values follow from changes."""

    def __init__(self) -> None:
        self._version: object = None
        self._tables: defaultdict[str, dict[Any, Any]] = defaultdict(dict)

    def refresh(self, version: object) -> None:
        """Forget all values, unless they are of this version."""
        if version != self._version:
            self._version = version
            self._tables.clear()

    def table(self, name: str) -> dict[Any, Any]:
        """Return a table of values, which its user fills."""
        return self._tables[name]
