"""Causes of failures, parsed from messages and counted over trials."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Cause", "cause_of", "causes", "log_of"]

_LOG = "Log: "
"""Prefix of the line of a message that names a log."""


@dataclass(frozen=True)
class Cause:
    """A cause of failure, and the trials that failed with it.

    Args:
        text: The cause in a line, the last line of a traceback.
        log: Path of the first log that a message names; "" if there is none.
    """

    text: str
    trials: tuple[int, ...]
    log: str
    reason: str = ""


def cause_of(message: str) -> str:
    """The last line of a message or traceback, without log lines; "" if there is none."""
    lines = [line.strip() for line in message.splitlines() if not line.startswith(_LOG)]
    return next((line for line in reversed(lines) if line), "")


def log_of(message: str) -> str:
    """Path of the last log that a message names; "" if there is none."""
    named = (line for line in reversed(message.splitlines()) if line.startswith(_LOG))
    return next(named, "").removeprefix(_LOG)


def causes(failed: Iterable[tuple[int, str]]) -> tuple[Cause, ...]:
    """The distinct causes, the most frequent first."""
    by_text: dict[str, list[tuple[int, str]]] = {}
    for number, message in failed:
        by_text.setdefault(cause_of(message) or "no reason was given", []).append((number, message))
    found = [
        Cause(
            text,
            tuple(number for number, _ in trials),
            next(filter(None, (log_of(message) for _, message in trials)), ""),
            trials[0][1],
        )
        for text, trials in by_text.items()
    ]
    return tuple(sorted(found, key=lambda cause: (-len(cause.trials), cause.trials)))
