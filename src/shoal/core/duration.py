"""Durations as users write them: "90s", "1h30m", or a number of seconds."""

import re
import reprlib
from math import inf
from numbers import Real

from shoal.core.errors import ShoalError

__all__ = ["parse_duration"]

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"\d+(?:\.\d+)?"
_PATTERN = re.compile("".join(f"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in _UNITS))


def parse_duration(name: str, value: object) -> float | None:
    """Return the seconds of an argument; None for None.

    Args:
        name: Name of the argument, for the error.
        value: Number of seconds above 0, or a text: "90s", "20m", "2h", "1d", "1h30m", or a number of seconds.

    Raises:
        ShoalError: it is none of these.
    """
    if value is None:
        return None
    seconds = 0.0
    if isinstance(value, str):
        parts = _PATTERN.fullmatch(f"{value}s" if re.fullmatch(_NUMBER, value) else value)
        found = {} if parts is None else parts.groupdict(default="0")
        seconds = sum(float(number) * _UNITS[unit] for unit, number in found.items())
    elif isinstance(value, Real) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 < seconds < inf:
        forms = "'90s', '20m', '2h', '1d', '1h30m' or a number of seconds, above 0"
        raise ShoalError(f"`{name}` must be a duration such as {forms}; got {reprlib.repr(value)}")
    return seconds
