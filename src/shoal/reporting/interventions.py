"""What people asked of a study, and what came of it."""

import time
from collections.abc import Sequence
from typing import Any

from shoal.journal.rows import Intervention

__all__ = ["asked_text", "intervention_json", "intervention_text"]


def intervention_json(each: Intervention) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "time": each.time,
        "verb": each.verb,
        "trials": list(each.trials),
        "devices": list(each.devices),
        "text": each.text,
        "refused": list(each.refused),
    }


def intervention_text(each: Intervention) -> str:
    """In a line: when, what was done, and what was not and why."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time))
    anything = each.trials or each.devices or each.text or not each.refused
    done = [asked_text(each.verb, each.trials, each.text or " ".join(each.devices))] if anything else []
    return f"{when} {'; '.join([*done, *(f'not done ({each.verb}): {why}' for why in each.refused)])}"


def asked_text(verb: str, trials: Sequence[int], text: str = "") -> str:
    """What was asked for, in words: "pause trials 3, 7", "clone 1000000 of trial 3"."""
    if verb == "clone":
        return " ".join(filter(None, [verb, *map(str, trials), text]))
    named = f" trial{'s' if len(trials) > 1 else ''} {', '.join(map(str, trials))}" if trials else ""
    said = verb.removesuffix(" trial") if named else verb
    return f"{said}{named}{f': {text}' if text and named else f' {text}' if text else ''}"
