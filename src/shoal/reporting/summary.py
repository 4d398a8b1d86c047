"""What a run is about to do, in the lines at its start."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.algorithms.base import Totals
from shoal.core.objective import objectives
from shoal.core.space import Space
from shoal.reporting.text import trials_text

__all__ = ["batch_text", "summary"]


def batch_text(space: Space, task: str | None) -> str:
    """How many samples a step has, as far as the space says.

    Args:
        space: of the study.
        task: name of the task if that has a `batch_size` of its own; else None.
    """
    if task is not None:
        return f"batch size as {task}.batch_size says"
    leaf = space.leaves().get("batch_size")
    if leaf is None:
        return "batch size 32 (default: the config has no batch_size)"
    values = ", ".join(map(str, leaf.values))
    missing = ", or 32 (default) where the config has no batch_size" if leaf.optional else ""
    return f"batch size{'s' if len(leaf.values) > 1 else ''} {values}{missing}"


def summary(study: Mapping[str, Any], devices: Sequence[str], directory: Path, done: str = "") -> list[str]:
    """What is trained, how much of it, for what, with which batches, where; old journals do not know all of it.

    Args:
        study: as the journal has it.
        devices: their names.
        directory: of the study.
        done: how far it is, if it is gone on with: "25 of 69 epochs".
    """
    unit = "reports" if study["opaque"] else "epochs"
    told = study.get("totals")
    much = "" if told is None else f" {_much(Totals(**told), unit)}, by"
    goals = " and ".join(
        f"{'maximises' if goal.mode == 'max' else 'minimises'} {goal.metric}"
        for goal in objectives(study["metric"], study["mode"])
    )
    batches = f"{study['batches']}; " if study.get("batches") else ""
    again = f"goes on after {done}; " if done else ""
    return [
        f"{study['task']}:{much} {study['algorithm']}; {goals}",
        f"{batches}{', '.join(devices) or 'no device'}; {again}directory {directory}",
    ]


def _much(totals: Totals, unit: str) -> str:
    most = f" to {totals.most}" if totals.most > totals.least else ""
    return f"{trials_text(totals.trials)}, {totals.least}{most} {unit} in all"
