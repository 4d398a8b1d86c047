"""Training steps by the task's own `step`, for all members of an array at once."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.data.tracked_config import MembersConfig
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.stacked import NeedsMemberError, Stacked, events
from shoal.task import Task, call, takes_config
from shoal.worker.trial_runtime import TrialRuntime, check_scalar, optimizers_in

__all__ = ["CustomStep"]


class CustomStep:
    """Takes training steps of all members of an array at once, by the task's own `step`.

    The step gets the array as its model, and for each optimizer an object that steps the optimizers of all members.

    Args:
        array: Models of the trials.
        runtimes: Trials, in the order of the array.
        task: Task with the step.

    Raises:
        FusionError: The trials' optimizers are nested differently, or cannot be fused.
    """

    def __init__(self, array: ModelArray, runtimes: Sequence[TrialRuntime], task: Task) -> None:
        self._array = array
        self._task = task
        self._config = MembersConfig([runtime.trial.config for runtime in runtimes]) if takes_config(task) else None
        specs = [pytree.tree_structure(runtime.optimizer) for runtime in runtimes]
        if any(spec != specs[0] for spec in specs):
            raise FusionError("the task's `optimizer` nests its optimizers differently for different trials")
        columns = zip(*(optimizers_in(runtime.optimizer) for runtime in runtimes), strict=True)
        self._optimizer: Any = pytree.tree_unflatten(
            [_AllMembers(fuse_optimizers(column, array)) for column in columns], specs[0]
        )

    def step(self, batch: Any) -> Tensor:
        """Take one step of every member; returns the losses, shape [B], detached.

        Raises:
            FusionError: The step reads a value that differs between members: a number, an optimizer's settings, a
                value of the config. The step is left half done.
        """
        bypassed = events.bypasses
        config = () if self._config is None else (copy.deepcopy(self._config),)  # a step may change its copy
        try:
            with self._array.open() as model:
                loss: Tensor = call(self._task, "step", model, batch, self._optimizer, *config)
        except (NeedsMemberError, RuntimeError) as reason:
            if not isinstance(reason, NeedsMemberError) and events.bypasses == bypassed:
                raise
            raise FusionError(f"the task's `step`: {reason}") from reason
        if isinstance(loss, Stacked):
            check_scalar("loss", loss.whole, axes=1)
            return loss.whole.detach()
        check_scalar("loss", loss)
        return loss.detach().expand(len(self._array))


class _AllMembers:
    """Stands for the optimizers of all members in the task's step."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`."""
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:
        """As `torch.optim.Optimizer.step`, without a closure."""
        if closure is not None:
            raise NeedsMemberError("an optimizer is given a closure")
        with torch._C.DisableTorchFunction():
            self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        raise NeedsMemberError(f"an optimizer is asked for {name!r}, which each member has of its own")
