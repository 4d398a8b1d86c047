"""Steps of all members of an array at once by the task's own `step`."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError, TaskError
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.per_member import error_location
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.step import StepMode
from shoal.task import Task, call, takes_config
from shoal.train.data.tracked_config import MembersConfig
from shoal.train.trial_runtime import TrialRuntime, check_scalar, optimizers_in

__all__ = ["CustomStep"]


class CustomStep:
    """Takes steps of all members at once by the task's own `step`, with the array as its model and joint optimizers."""

    last_mode: StepMode = "eager"
    next_mode: StepMode = "eager"

    def __init__(self, array: ModelArray, runtimes: Sequence[TrialRuntime], task: Task) -> None:
        self._array = array
        self._task = task
        self._config = MembersConfig([runtime.trial.config for runtime in runtimes]) if takes_config(task) else None
        specs = [pytree.tree_structure(runtime.optimizer) for runtime in runtimes]
        if any(spec != specs[0] for spec in specs):
            raise FusionError("the task's `optimizer` nests its optimizers differently for different trials")
        columns = zip(*(optimizers_in(runtime.optimizer) for runtime in runtimes), strict=True)
        self._optimizer: Any = pytree.tree_unflatten(
            [_FusedOptimizerView(fuse_optimizers(column, array)) for column in columns], specs[0]
        )

    def synchronize(self) -> None:
        """As for `TrainingStep`."""
        self._array.state.sync_to_members()

    def __call__(self, batch: Any) -> Tensor:
        """Take one step; return the losses, [B], detached. Values that differ between members are refused midway.

        So is any error: plain training raises it again if it is the user's own.
        """
        config = () if self._config is None else (copy.deepcopy(self._config),)  # a step may change its copy
        try:
            with self._array.open() as model:
                loss: Tensor = call(self._task, "step", model, batch, self._optimizer, *config)
        except (FusionError, TaskError, torch.OutOfMemoryError):
            raise
        except (NeedsMemberError, Exception) as reason:
            kind = "" if isinstance(reason, NeedsMemberError) else f"{type(reason).__name__}: "
            where = error_location(reason, self._task.step)
            raise FusionError(f"the task's `step`, {where}: {kind}{reason}") from reason
        if isinstance(loss, Stacked):
            check_scalar("loss", loss.whole, axes=1)
            return loss.whole.detach()
        check_scalar("loss", loss)
        return loss.detach().expand(len(self._array))


class _FusedOptimizerView:
    """Represents the optimizers of all members in the task's `step`."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`."""
        with torch._C.DisableTorchFunction():
            self._optimizer.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:
        """As `torch.optim.Optimizer.step`, without a closure."""
        if closure is not None:
            raise NeedsMemberError("an optimizer is given a closure")
        with torch._C.DisableTorchFunction():
            self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        raise NeedsMemberError(f"an optimizer is asked for {name!r}, which each member has of its own")
