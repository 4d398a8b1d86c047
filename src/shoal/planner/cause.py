"""What the message of a failure says of its cause."""

import re

__all__ = ["cause_of", "log_of"]

_LOG = "Log: "
"""Begins the line of a message that names a log."""
_TRIES = re.compile(r"^[a-z ]+ after \d+ retries(, twice alike at epoch \d+)?: ")
"""What the reason of a trial that has failed for good begins with, see `Aftermath`: nothing of its cause."""


def cause_of(message: str) -> str:
    """The line that names the cause, the last one: what a traceback ends with; "" if there is none."""
    lines = [line.strip() for line in message.splitlines() if not line.startswith(_LOG)]
    return _TRIES.sub("", next((line for line in reversed(lines) if line), ""))


def log_of(message: str) -> str:
    """Path of the log that is named last; "" if none is."""
    named = (line for line in reversed(message.splitlines()) if line.startswith(_LOG))
    return next(named, "").removeprefix(_LOG)
