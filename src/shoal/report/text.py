"""Numbers, times and configs in the words of a table."""

from typing import Any

from shoal.report.snapshot import Snapshot
from shoal.space import flatten
from shoal.trial import Config, TrialState

__all__ = ["best_text", "config_text", "duration", "leaf_text", "number", "states_text"]


def number(value: Any) -> str:
    """Floats to four significant digits, "–" for None, everything else as it is."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    names = {
        TrialState.PENDING: "waiting",
        TrialState.RUNNING: "interrupted" if snapshot.pid is None else "running",
    }
    parts = [f"{count} {names.get(state, state)}" for state, count in snapshot.states.items() if count]
    return ", ".join(parts) or "none yet"


def leaf_text(value: Any) -> str:
    """A value of a config: None is a value like others there."""
    return "None" if value is None else number(value)
