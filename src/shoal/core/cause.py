"""What the message of a failure says of its cause, and what trials failed of."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Cause", "cause_of", "causes", "log_of"]

_LOG = "Log: "
"""Begins the line of a message that names a log."""


@dataclass(frozen=True)
class Cause:
    """What trials have failed of.

    Args:
        text: in a line: what a traceback ends with.
        trials: their numbers, ascending.
        log: path of the log of the first that names one; "" if none does.
        reason: all that is known of the first of them.
    """

    text: str
    trials: tuple[int, ...]
    log: str
    reason: str = ""


def cause_of(message: str) -> str:
    """The line that names the cause, the last one: what a traceback ends with; "" if there is none."""
    lines = [line.strip() for line in message.splitlines() if not line.startswith(_LOG)]
    return next((line for line in reversed(lines) if line), "")


def log_of(message: str) -> str:
    """Path of the log that is named last; "" if none is."""
    named = (line for line in reversed(message.splitlines()) if line.startswith(_LOG))
    return next(named, "").removeprefix(_LOG)


def causes(failed: Iterable[tuple[int, str]]) -> tuple[Cause, ...]:
    """The distinct causes, the most frequent first.

    Args:
        failed: number of each trial that has failed, ascending, and the message.
    """
    alike: dict[str, list[tuple[int, str]]] = {}
    for number, message in failed:
        alike.setdefault(cause_of(message) or "no reason was given", []).append((number, message))
    found = [
        Cause(
            text,
            tuple(number for number, _ in trials),
            next(filter(None, (log_of(message) for _, message in trials)), ""),
            trials[0][1],
        )
        for text, trials in alike.items()
    ]
    return tuple(sorted(found, key=lambda cause: (-len(cause.trials), cause.trials)))
