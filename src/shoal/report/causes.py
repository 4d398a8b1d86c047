"""What trials failed of: each cause once, with the trials that it ended."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.planner.cause import cause_of, log_of

__all__ = ["Cause", "causes"]


@dataclass(frozen=True)
class Cause:
    """What trials have failed of.

    Args:
        text: in a line: what a traceback ends with.
        trials: their numbers, ascending.
        log: path of the log of the first that names one; "" if none does.
        reason: all that is recorded of the first of them, if it has failed for good.
    """

    text: str
    trials: tuple[int, ...]
    log: str
    reason: str = ""


def causes(failed: Iterable[tuple[int, str]]) -> tuple[Cause, ...]:
    """The distinct causes, the most frequent first.

    Args:
        failed: number of each trial that has failed for good, and the reason.
    """
    alike: dict[str, list[tuple[int, str]]] = {}
    for number, reason in failed:
        alike.setdefault(cause_of(reason) or "no reason was given", []).append((number, reason))
    found = [
        Cause(
            text,
            tuple(sorted(number for number, _ in trials)),
            next(filter(None, (log_of(reason) for _, reason in trials)), ""),
            trials[0][1],
        )
        for text, trials in alike.items()
    ]
    return tuple(sorted(found, key=lambda cause: (-len(cause.trials), cause.trials)))
