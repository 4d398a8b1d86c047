"""Training steps that the user has written: several optimizers, several losses, anything a loop may do."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.stacked import NeedsMemberError, Stacked, events
from shoal.task import Task, call, takes_config
from shoal.worker.learner import Learner, check_scalar, optimizers_in
from shoal.worker.reading import MembersConfig
from shoal.worker.way_back import WayBack

__all__ = ["OwnStep", "take_step"]

_log = logging.getLogger("shoal.worker")


def take_step(task: Task, learner: Learner, batch: Any, with_config: bool) -> Tensor:
    """One step of one learner by itself, by the task's `step`; returns the loss.

    Args:
        task: the user's.
        learner: who takes it.
        batch: its own, which the step may change.
        with_config: see `shoal.task.takes_config`.

    Raises:
        TaskError: the loss is no real scalar.
    """
    config = learner.trial.config if with_config else None
    loss: Tensor = call(task, "step", learner.model, batch, learner.optimizer, config=config)
    check_scalar("loss", loss)
    return loss.detach()


class OwnStep:
    """Takes training steps by the task's own `step`: of all members at once where that can be, else of one by one.

    The step is shown the array as one model, and in place of each optimizer one that steps all members'. Where it asks
    for what only one member has (a number, an optimizer's settings, a value of its config), the array goes back to
    where the step began, and from then on the members take the step one after another, each with its own.

    Args:
        array: the models.
        learners: whose models they are.
        task: whose step it is.

    Raises:
        FusionError: the learners' optimizers are nested differently.
    """

    def __init__(self, array: ModelArray, learners: Sequence[Learner], task: Task) -> None:
        self._array = array
        self._task = task
        self._own = {id(learner.model): learner for learner in learners}
        self._with_config = takes_config(task)
        self._config = MembersConfig([learner.trial.config for learner in learners])
        self._shown: Any = None
        self._at_once = len(learners) > 1
        specs = [pytree.tree_structure(learner.optimizer) for learner in learners]
        if any(spec != specs[0] for spec in specs):
            raise FusionError("the task's `optimizer` nests its optimizers differently for different trials")
        if self._at_once:
            columns = zip(*(optimizers_in(learner.optimizer) for learner in learners), strict=True)
            try:
                fused = [fuse_optimizers(column, array) for column in columns]
                self._way_back = WayBack(array, fused)
                shown = [_AllMembers(optimizer, self._way_back) for optimizer in fused]
                self._shown = pytree.tree_unflatten(shown, specs[0])
            except FusionError as reason:
                self._part(reason)

    settled = True
    """Nothing is timed here."""

    def step(self, batch: Any) -> Tensor:
        """One step of every member; returns the losses, shape [B], part of no graph."""
        if self._at_once:
            at_once = self._try_at_once(batch)
            if at_once is not None:
                return at_once
        return torch.stack(list(self._array.one_by_one(self._step_alone, batch)))

    def _step_alone(self, model: nn.Module, batch: Any) -> Tensor:
        return take_step(self._task, self._own[id(model)], batch, self._with_config)

    def _try_at_once(self, batch: Any) -> Tensor | None:
        """One step of all members as one; None, and nothing changed, if that cannot be."""
        self._way_back.begin()
        bypassed = events.bypasses
        try:
            with self._array.open() as model:
                config = (copy.deepcopy(self._config),) if self._with_config else ()  # each step may change its own
                loss: Tensor = call(self._task, "step", model, batch, self._shown, *config)
        except (NeedsMemberError, RuntimeError) as reason:
            if not isinstance(reason, NeedsMemberError) and events.bypasses == bypassed:
                raise
            self._part(reason)
            self._way_back.take()
            self._hand_over()
            return None
        if isinstance(loss, Stacked):
            check_scalar("loss", loss.whole, axes=1)
            return loss.whole.detach()
        check_scalar("loss", loss)
        return loss.detach().expand(len(self._array))

    def _part(self, reason: BaseException) -> None:
        _log.warning("the task's `step` is taken by one member after another: %s", reason)
        self._at_once = False

    def _hand_over(self) -> None:
        """Give the members the gradients of steps before, for a step that accumulates those of several batches."""
        for _, stacked, own in self._array.columns():
            grad, stacked.grad = stacked.grad, None
            if grad is not None:
                for b, parameter in enumerate(own):
                    parameter.grad = grad[b]


class _AllMembers:
    """What a step sees in place of an optimizer."""

    def __init__(self, optimizer: FusedOptimizer, way_back: WayBack) -> None:
        self._optimizer = optimizer
        self._way_back = way_back

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer."""
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:
        """As of any optimizer, without a closure."""
        if closure is not None:
            raise NeedsMemberError("an optimizer is given a closure")
        with torch._C.DisableTorchFunction():
            self._way_back.before(self._optimizer)
            self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        raise NeedsMemberError(f"an optimizer is asked for {name!r}, which each member has of its own")
