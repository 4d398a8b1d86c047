"""What one plan has computed and the next can use."""

from collections import defaultdict
from typing import Any

__all__ = ["PlanCache"]


class PlanCache:
    """Values by what they follow from, while the costs of trials, the kinds of devices and the switch time stay equal.

    No result of a plan depends on it.
    """

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
