"""What people asked of a study, and what came of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Intervention", "asked_text", "intervention_json", "intervention_text", "interventions"]


@dataclass(frozen=True)
class Intervention:
    """A request of a user that was looked at.

    Args:
        time: when it was, in seconds since 1970.
        verb: what was to be done.
        trials: numbers of those with which it was done.
        text: what else is to be said of what was done.
        refused: what was not done, and why, a line each.
    """

    time: float
    verb: str
    trials: tuple[int, ...]
    text: str
    refused: tuple[str, ...]


def interventions(study: Mapping[str, Any]) -> tuple[Intervention, ...]:
    """All of them, in order.

    Args:
        study: as of `JournalView.study`.
    """
    return tuple(
        Intervention(each["time"], each["verb"], tuple(each["trials"]), each["text"], tuple(each["refused"]))
        for each in study.get("interventions", ())
    )


def intervention_json(each: Intervention) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "time": each.time,
        "verb": each.verb,
        "trials": list(each.trials),
        "text": each.text,
        "refused": list(each.refused),
    }


def intervention_text(each: Intervention) -> str:
    """In a line: when, what was done, and what was not and why."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time))
    anything = each.trials or each.text or not each.refused
    done = [asked_text(each.verb, each.trials, each.text)] if anything else []
    return f"{when} {'; '.join([*done, *(f'not done ({each.verb}): {why}' for why in each.refused)])}"


def asked_text(verb: str, trials: Sequence[int], text: str = "") -> str:
    """What was asked for, in words: "pause trials 3, 7", "clone 1000000 of trial 3"."""
    if verb == "clone":
        return " ".join(filter(None, [verb, *map(str, trials), text]))
    named = f" trial{'s' if len(trials) > 1 else ''} {', '.join(map(str, trials))}" if trials else ""
    said = verb.removesuffix(" trial") if named else verb
    return f"{said}{named}{f': {text}' if text and named else f' {text}' if text else ''}"
