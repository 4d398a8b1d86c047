"""Training steps that the user has written: several optimizers, several losses, anything a loop may do."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.randomness import OtherGenerators
from shoal.fuse.stacked import NeedsMemberError, Stacked, events
from shoal.worker.learner import Learner, check_scalar, optimizers_in

__all__ = ["OwnStep"]

_log = logging.getLogger("shoal.worker")

Step = Callable[[nn.Module, Any, Any], Tensor]
"""`Task.step`: takes a model, a batch and what `Task.optimizer` returned; trains, and returns the loss."""


class OwnStep:
    """Takes training steps by the task's own `step`: of all members at once where that can be, else of one by one.

    The step is shown the array as one model, and in place of each optimizer one that steps all members'. Where it asks
    for what only one member has (a number, an optimizer's settings), the array goes back to where the step began, and
    from then on the members take the step one after another, each with its own model and optimizers.

    Args:
        array: the models.
        learners: whose models they are.
        step: the task's own.

    Raises:
        FusionError: the learners' optimizers are nested differently.
    """

    def __init__(self, array: ModelArray, learners: Sequence[Learner], step: Step) -> None:
        self._array = array
        self._step = step
        self._own = {id(learner.model): learner.optimizer for learner in learners}
        self._fused: list[FusedOptimizer] = []
        self._shown: Any = None
        self._at_once = len(learners) > 1
        specs = [pytree.tree_structure(learner.optimizer) for learner in learners]
        if any(spec != specs[0] for spec in specs):
            raise FusionError("the task's `optimizer` nests its optimizers differently for different trials")
        if self._at_once:
            columns = zip(*(optimizers_in(learner.optimizer) for learner in learners), strict=True)
            try:
                self._fused = [fuse_optimizers(column, array) for column in columns]
                self._shown = pytree.tree_unflatten([_AllMembers(optimizer) for optimizer in self._fused], specs[0])
            except FusionError as reason:
                self._part(reason)

    def step(self, batch: Any) -> Tensor:
        """One step of every member; returns the losses, shape [B], part of no graph."""
        if self._at_once:
            at_once = self._try_at_once(batch)
            if at_once is not None:
                return at_once
        losses: list[Tensor] = []
        for loss in self._array.one_by_one(lambda model, batch: self._step(model, batch, self._own[id(model)]), batch):
            check_scalar("loss", loss)
            losses.append(loss.detach())
        return torch.stack(losses)

    def _try_at_once(self, batch: Any) -> Tensor | None:
        """One step of all members as one; None, and nothing changed, if that cannot be."""
        before, others = _Snapshot(self._array, self._fused), OtherGenerators()
        tick, bypassed = self._array.tick, events.bypasses
        try:
            with self._array.open() as model:
                loss = self._step(model, batch, self._shown)
        except (NeedsMemberError, RuntimeError) as reason:
            if not isinstance(reason, NeedsMemberError) and events.bypasses == bypassed:
                raise
            self._part(reason)
            before.restore()
            others.restore()
            self._array.tick = tick
            return None
        except FusionError:
            before.restore()
            raise
        if isinstance(loss, Stacked):
            check_scalar("loss", loss.whole, axes=1)
            return loss.whole.detach()
        check_scalar("loss", loss)
        return loss.detach().expand(len(self._array))

    def _part(self, reason: Exception) -> None:
        _log.warning("the task's `step` is taken by one member after another: %s", reason)
        self._at_once = False


class _AllMembers:
    """What a step sees in place of an optimizer."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any optimizer."""
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:
        """As of any optimizer, without a closure."""
        if closure is not None:
            raise NeedsMemberError("an optimizer is given a closure")
        with torch._C.DisableTorchFunction():
            self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        raise NeedsMemberError(f"an optimizer is asked for {name!r}, which each member has of its own")


class _Snapshot:
    """The state of an array and of its members' optimizers, to go back to."""

    def __init__(self, array: ModelArray, fused: Sequence[FusedOptimizer]) -> None:
        self._members = [member for optimizer in fused for member in optimizer.members]
        self._states = [{param: dict(state) for param, state in member.state.items()} for member in self._members]
        of_states = (value for states in self._states for state in states.values() for value in state.values())
        self._tensors = [
            (tensor, tensor.clone()) for tensor in _memories((*array.parameters(), *array.buffers(), *of_states))
        ]

    def restore(self) -> None:
        """Bring back all weights, buffers and optimizer states."""
        with torch.no_grad():
            for tensor, saved in self._tensors:
                tensor.copy_(saved)
        for member, states in zip(self._members, self._states, strict=True):
            member.state.clear()
            member.state.update(states)


def _memories(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, those that are views of one tensor once, as that tensor; part of no graph."""
    found = {}
    for value in values:
        if isinstance(value, Tensor):
            whole = value if value._base is None else value._base
            found[id(whole)] = whole.detach()
    return list(found.values())
