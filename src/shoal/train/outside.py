"""State that a task keeps outside of its models: globals, variables of closures, containers of the task, classes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.errors import TaskError
from shoal.fuse.transaction import Transaction
from shoal.task import Task
from shoal.train.data.datasets import DataSets

__all__ = ["OutsideState", "refuse_lasting_change", "shares_outside"]

WATCHED_CALLS = 3
"""Calls in a row of a trial's methods that change such state; with fewer, the state may be a cache that fills."""


def shares_outside(label: str) -> str:
    """Return why trials whose steps change something outside of their models train one by one."""
    return (
        f"steps change `{label}`, outside of the models, which all trials of a process share; they train one by one, "
        "each with its own values; keep what belongs to a trial on its model"
    )


def refuse_lasting_change(snapshot: Transaction) -> None:
    """Refuse a change that no snapshot restores.

    Raises:
        TaskError: There is such a change.
    """
    if (label := snapshot.changed_for_good()) is not None:
        raise TaskError(
            f"a step changes `{label}`, which all trials of a process share; it is too large for each "
            "trial to have its own; make it a part of the model that `model` returns"
        )


class OutsideState:
    """Gives each trial of a process its own state outside of models, if its first calls change such state.

    The state of each trial begins as it was when the first trial was built. Checkpoints do not contain it.

    Args:
        sets: Data sets of the batches; their state belongs to no trial.
    """

    def __init__(self, task: Task, sets: DataSets) -> None:
        self.changed = ""
        """Name of the state that a step was seen to change; "" for none, so that trials share all of it."""
        self.built: set[str] = set()
        """Names of the state that building models was seen to change, which no restore takes back."""
        self._task, self._sets = task, sets
        self._builds = 0
        self._classes: set[type] = set()
        self._first: list[Transaction] = []
        self._own: dict[int, Transaction] = {}
        self._watched: Counter[tuple[int, str]] = Counter()
        self._models: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def snapshot(self, model: nn.Module) -> Transaction:
        """Return a snapshot of all that the task and a model's classes keep outside of the models of trials."""
        return self._snapshot(set(map(type, model.modules())), model)

    def include(self, model: nn.Module) -> None:
        """Include what the classes of a model that was just built keep."""
        self._models[model] = None
        classes = set(map(type, model.modules())) - self._classes
        if classes or not self._first:
            self._first.append(self._snapshot(classes))
            self._classes |= classes

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context manager for a build of a trial: what the first ones change is `built`."""
        self._builds += 1
        if self._builds > WATCHED_CALLS:
            yield
            return
        before = self._snapshot(self._classes)
        yield
        self.built.update(before.changes())

    def begin(self, trial: int, model: nn.Module) -> None:
        """Let a trial whose model was just built begin with the first state."""
        self._own.pop(trial, None)
        self.include(model)

    def restore_first(self) -> None:
        """Restore the first state."""
        for each in reversed(self._first):
            each.restore(self.built)

    @contextmanager
    def of(self, trial: int, model: nn.Module, what: str) -> Iterator[None]:
        """Context manager for a call of a trial's methods in plain PyTorch.

        Args:
            what: Kind of the call: calls of one kind are watched together.
        """
        if not self.changed and self._watched[trial, what] >= WATCHED_CALLS:
            yield
            return
        if (before := self._own.get(trial)) is not None:
            before.restore(self.built)
        else:
            self.restore_first()
            before = self.snapshot(model)
        yield
        refuse_lasting_change(before)
        label = before.changed()
        if trial not in self._own or label is not None:
            self._own[trial] = self.snapshot(model)
        if label is None:
            self._watched[trial, what] = WATCHED_CALLS
            return
        self._watched[trial, what] += 1
        if self._watched[trial, what] == WATCHED_CALLS:
            self.changed = self.changed or label

    def _snapshot(self, classes: Iterable[type], *left_out: nn.Module) -> Transaction:
        task = self._task
        methods = (task.step, task.loss, task.metrics, task.outputs, task.evaluate, task.end_epoch)
        return Transaction(functions=methods, classes=classes, left_out=(*left_out, *self._models, *self._sets.sources))
