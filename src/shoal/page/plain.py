"""JSON text of values that a browser can parse."""

import json
import math
from typing import Any

__all__ = ["json_text"]


def json_text(value: Any) -> str:
    """Return compact JSON text. A NaN or an infinity in a configuration becomes a text, as JSON has neither.

    Args:
        value: None, bool, int, float, str, or lists, tuples and string-keyed dicts of these.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
