"""State that a task keeps outside of its models: globals, variables of closures, containers of the task, classes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from shoal.fuse.transaction import Transaction
from shoal.task import Task

__all__ = ["OutsideState", "outside_snapshot"]


def outside_snapshot(task: Task, classes: Iterable[type]) -> Transaction:
    """Return a snapshot of what the methods of a task, and classes of modules, keep outside of models."""
    return Transaction(functions=(task.step, task.loss, task.metrics, task.outputs), classes=classes)


class OutsideState:
    """Gives each trial of a process its own state outside of models, once a step was seen to change such state.

    It begins for each trial as it was when this object was made, before any training. It is not in checkpoints.
    """

    def __init__(self, task: Task) -> None:
        self.active = False
        """Whether trials have their own state."""
        self._task = task
        self._first = outside_snapshot(task, _subclasses(nn.Module))
        self._own: dict[int, Transaction] = {}

    def forget(self, trial: int) -> None:
        """Let a trial begin with the first state."""
        self._own.pop(trial, None)

    @contextmanager
    def of(self, trial: int, model: nn.Module) -> Iterator[None]:
        """Context manager in which a trial has its own state, if that is `active`."""
        if not self.active:
            yield
            return
        self._own.get(trial, self._first).restore()
        try:
            yield
        finally:
            self._own[trial] = outside_snapshot(self._task, set(map(type, model.modules())))


def _subclasses(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield each
        yield from _subclasses(each)
