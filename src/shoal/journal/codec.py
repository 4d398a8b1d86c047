"""Configs and settings as JSON text: floats come back to the last bit, NaN and infinities included."""

import json
from typing import Any

from shoal.core.errors import JournalError

__all__ = ["encode", "storable"]


def encode(value: Any, what: str) -> str:
    """JSON text of a value.

    Args:
        value: None, bool, int, float, str, or lists and string-keyed dicts of these.
        what: names it in an error: "the config of trial 7".

    Raises:
        JournalError: it holds something else.
    """
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise JournalError(
            f"{what} cannot be kept in the journal ({error}): {value!r}; use None, bool, int, float, str, or lists and "
            "string-keyed dicts of these"
        ) from error


def storable(text: str) -> str:
    """A text as SQLite can keep it: half a character, which UTF-8 has no word for, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
