"""Numbers, times and configs in the words of a table."""

import math
from typing import Any

from shoal.report.snapshot import Snapshot
from shoal.space import flatten
from shoal.trial import Config, TrialState

__all__ = [
    "best_text",
    "config_text",
    "duration",
    "finite",
    "leaf_text",
    "number",
    "rounded",
    "state_text",
    "states_text",
]


def number(value: Any) -> str:
    """Floats to four significant digits, "–" for None, everything else as it is."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finite(value: float | None) -> float | None:
    """A number as JSON can have it: None for NaN and the infinities."""
    return value if value is not None and math.isfinite(value) else None


def rounded(value: float, digits: int) -> str:
    """A float to so many digits, in as few characters as read well: "0.083", "170", "3.2e-4"."""
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if value == 0 or -3 < int(exponent) < 5:
        return repr(float(f"{value:.{digits}g}")).removesuffix(".0")
    return f"{repr(float(mantissa)).removesuffix('.0')}e{int(exponent)}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, "1:02:03"; "–" for what is not known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def config_text(config: Config) -> str:
    """A config on one line: "lr=0.001 optimizer.name=sgd"."""
    return " ".join(f"{name}={leaf_text(value)}" for name, value in flatten(config).items())


def best_text(snapshot: Snapshot) -> str:
    """The best trial on one line: "accuracy 0.9812 by trial 7 with lr=0.001"; "–" when there is none."""
    best = snapshot.best
    if best is None:
        return "–"
    return f"{snapshot.metric} {number(best.value)} by trial {best.trial} with {config_text(best.config)}"


def states_text(snapshot: Snapshot) -> str:
    """How many trials are in which state: "3 waiting, 2 running, 7 complete"."""
    runs = snapshot.pid is not None
    parts = [f"{count} {state_text(state, runs)}" for state, count in snapshot.states.items() if count]
    return ", ".join(parts) or "none yet"


def state_text(state: TrialState, runs: bool) -> str:
    """A state in a user's words.

    Args:
        state: of a trial.
        runs: whether a process runs the study.
    """
    match state:
        case TrialState.PENDING:
            return "waiting"
        case TrialState.RUNNING if not runs:
            return "interrupted"
    return str(state)


def leaf_text(value: Any) -> str:
    """A value of a config: None is a value like others there."""
    return "None" if value is None else number(value)
