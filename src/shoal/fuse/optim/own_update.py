"""Optimizer steps that members take by themselves: one optimizer, or one after another in an array."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer, SparseAdam
from torch.optim.optimizer import _use_grad_for_differentiable

from shoal.core.errors import FusionError
from shoal.fuse.optim.param_state import StackedParam
from shoal.fuse.optim.table import steps_as_made

__all__ = ["MemberLoop", "OwnUpdate"]

_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""By exact class: a subclass may do anything in its `step`."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_ZERO_GRAD = Optimizer.zero_grad
_HOOKS = Optimizer.profile_hook_step(_KERNELS[0].step).__code__
_NO_GRAD = _use_grad_for_differentiable(_KERNELS[0].step).__code__
"""Code of the two wrappers around each `step` of torch: hooks and profiler, then gradients and compiler."""


class OwnUpdate:
    """Lets an optimizer step.

    Where neither `foreach` nor `fused` was asked for, torch loops over the parameters of a CPU, which takes ten times
    as long for small ones as a fused kernel does. The optimizer is told to use that for its own step, and is as it was
    before and after it. What torch does around a step for hooks, its profiler and its compiler takes as long again as
    the kernel: where there are none of these, the step alone is called.

    Args:
        optimizer: any of torch's or of the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._has_kernel: bool | None = None if type(optimizer) in _KERNELS else False
        self._wrapped: Callable[..., Any] | None = None
        self._bare: Callable[..., Any] | None = None

    def zero_grad(self) -> None:
        """Drop the gradients, as the optimizer's `zero_grad` does."""
        optimizer = self._optimizer
        replaced = type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer)
        if replaced or _profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = None

    def __call__(self) -> None:
        """One step."""
        if self._has_kernel is None:  # not before: lazy parameters have no shape until a model has run
            params = [each for group in self._optimizer.param_groups for each in group["params"]]
            self._has_kernel = all(
                each.dtype in _DTYPES and torch.empty_like(each).stride() == each.stride() for each in params
            )  # with no gaps in memory
        as_made = type(self._optimizer) in _KERNELS and steps_as_made(self._optimizer)
        chosen = []
        if self._has_kernel and as_made:
            chosen = [group for group in self._optimizer.param_groups if self._by_kernel(group)]
        for group in chosen:
            group["fused"] = True
        try:
            self._step(as_made)
        finally:
            for group in chosen:
                group["fused"] = None

    def _step(self, as_made: bool) -> None:
        """Let the optimizer step; `as_made`: as torch's class does, with no hooks."""
        optimizer = self._optimizer
        if not as_made or optimizer.defaults["differentiable"] or _profiler_enabled():
            optimizer.step()
            return
        step = type(optimizer).step
        if step is not self._wrapped:
            self._wrapped, self._bare = step, _bare(step)
        if self._bare is None:
            optimizer.step()
            return
        if "step" in vars(optimizer):  # a scheduler's, which looks for this
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with torch.no_grad():
            self._bare(optimizer)

    def _by_kernel(self, group: dict[str, Any]) -> bool:
        """Whether the kernel does what the loop would; that of SGD begins momentum for all or none."""
        if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
            return False
        if group.get("capturable"):
            return False
        state, momentum = self._optimizer.state, group.get("momentum")
        for each in group["params"]:
            if (grad := each.grad) is None:
                continue
            if grad.stride() != each.stride() or (momentum and each not in state):
                return False
            if not each.is_cpu and each in state and not _is_countable(each, state[each].get("step")):
                return False
        return True


def _bare(step: Any) -> Callable[..., Any] | None:
    """A class's `step` without what torch wraps it in; None where anything else is around it."""
    if getattr(step, "__code__", None) is _HOOKS:
        step = step.__wrapped__
    return step.__wrapped__ if getattr(step, "__code__", None) is _NO_GRAD else None


def _is_countable(parameter: Tensor, count: object) -> bool:
    """Whether a kernel can read a parameter's count of updates: a GPU's reads float32 in its own memory only."""
    if not isinstance(count, Tensor):
        return True
    return count.device == parameter.device and count.dtype == torch.float32


class MemberLoop:
    """Optimizers without a fused rule, one after another.

    Each is lent its rows of the gradients and updates its own parameters, which are views of the array's, along with
    those that no other member has. Its state stays its own.

    Args:
        members: the optimizers.
        start: index of the first of them in the array.
        columns: each member's parameters.

    Raises:
        FusionError: an optimizer needs a closure, which would run one member alone, or sparse gradients.
    """

    def __init__(self, members: Sequence[Optimizer], start: int, columns: Sequence[Sequence[StackedParam]]) -> None:
        self._members = members
        self._start = start
        self._columns = columns
        for b, member in enumerate(members, start):
            if isinstance(member, SparseAdam):
                raise FusionError(
                    f"the optimizer of member {b}, SparseAdam, needs sparse gradients, which an array does not have; "
                    "use torch.optim.Adam, and sparse=False in the model"
                )
            _, *others = inspect.signature(type(member).step).parameters.values()
            if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others):
                raise FusionError(
                    f"the optimizer of member {b}, {type(member).__qualname__}, needs a closure to step, "
                    "which an array cannot give it; train this model alone"
                )

    def refresh(self) -> bool:
        """Nothing is kept of the members' parameter groups, so nothing grows old."""
        return True

    def step(self, missing: Mapping[Tensor, Collection[int]]) -> None:
        """Let every member step.

        Args:
            missing: as for `ParamGroupBatch.step`.

        Raises:
            FusionError: an optimizer put its parameters elsewhere in memory, so that they left the array.
        """
        for b, (member, columns) in enumerate(zip(self._members, self._columns, strict=True), self._start):
            for column in columns:
                grad = column.grad()
                column.own[b].grad = None if grad is None or b in missing.get(column.stacked, ()) else grad[b]
            try:
                member.step()
            except Exception as error:
                error.add_note(
                    f"raised by the optimizer of member {b}; members before it have been updated, it and those after "
                    f"it may not have been: go on from a checkpoint, without member {b} (`array.select`)"
                )
                raise
            finally:
                for column in columns:
                    column.own[b].grad = None
            for column in columns:
                if column.own[b].data_ptr() != column.stacked[b].data_ptr():
                    raise FusionError(
                        f"the optimizer of member {b}, {type(member).__qualname__}, replaced the memory of "
                        f"{column.path!r} instead of updating it in place; train this model alone"
                    )
