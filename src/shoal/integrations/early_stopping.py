"""Callbacks of trainers, and those that stop a training early as rules of a study."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.algorithms.rules import Patience, StopRule
from shoal.core.errors import TaskError
from shoal.core.objective import Objective

__all__ = ["EarlyStop", "are_callbacks", "rules_for"]


@dataclass(frozen=True)
class EarlyStop:
    """A callback that stops a training when what it monitors does not improve.

    Args:
        shown: The callback in words, as in "EarlyStopping(monitor='val_loss')".
        goal: What it monitors, by the name that the task reports.
        rule: When it stops.
    """

    shown: str
    goal: Objective
    rule: Patience


def are_callbacks(callbacks: object, *names: str) -> bool:
    """Whether an argument `callbacks` is a list only of callbacks of classes of these names, or of their subclasses."""
    return isinstance(callbacks, list | tuple) and all(
        not {kind.__name__ for kind in type(each).__mro__}.isdisjoint(names) for each in callbacks
    )


def rules_for(stops: Sequence[EarlyStop], objectives: Sequence[Objective]) -> list[StopRule]:
    """The rules of callbacks in a study.

    Raises:
        TaskError: a callback monitors something else than the study's first metric.
    """
    first = objectives[0]
    for stop in stops:
        if stop.goal != first:
            raise TaskError(
                f"{stop.shown} means metric={stop.goal.metric!r}, mode={stop.goal.mode!r} of shoal.tune, which was "
                f"given metric={first.metric!r}, mode={first.mode!r}; make them agree, or leave it out: the algorithm "
                "of the study stops trials, too"
            )
    return [stop.rule for stop in stops]
