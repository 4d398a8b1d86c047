"""docs/renamed.md: what it calls gone is gone, and what it names instead is there."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "renamed.md"
ROWS = re.findall(r"^\| `(shoal\.[\w.]+)` \| `(shoal\.[\w.]+)` \|$", PAGE.read_text(), re.MULTILINE)


def there(name: str) -> bool:
    """Whether a dotted name leads to a module, what it has, or a field of a class."""
    found: object = importlib.import_module("shoal")
    for place, part in enumerate(parts := name.split("."), 1):
        if place == 1:
            continue
        fields = {each.name for each in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        if part in fields:
            return place == len(parts)
        try:
            found = getattr(found, part, None) or importlib.import_module(".".join(parts[:place]))
        except ImportError:
            return False
    return True


@pytest.mark.parametrize(("before", "now"), ROWS)
def test_what_was_renamed(before: str, now: str) -> None:
    assert not there(before)
    assert there(now)


def test_all_rows_are_read() -> None:
    assert len(ROWS) == PAGE.read_text().count("\n| `shoal") > 30
