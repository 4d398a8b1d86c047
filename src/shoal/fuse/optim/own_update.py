"""Optimizers that step by themselves, without a fused rule: a single one, or the members of an array in turn."""

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
"""Exact classes; the `step` of a subclass may do anything."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_ZERO_GRAD = Optimizer.zero_grad
_HOOKS = Optimizer.profile_hook_step(_KERNELS[0].step).__code__
_NO_GRAD = _use_grad_for_differentiable(_KERNELS[0].step).__code__
"""Code of the two wrappers around each `step` in torch: hooks and profiler, then gradients and compiler."""


class OwnUpdate:
    """The step of one optimizer by itself, with torch's fused kernel where it has one.

    If neither `foreach` nor `fused` is set, torch loops over parameters on the CPU, which takes ten times as long for
    small parameters as a fused kernel. The optimizer is set to `fused` for the duration of its step. Torch's wrappers
    around a step, for hooks, profiler and compiler, take as long as the kernel: they are skipped if none is in use.

    Args:
        optimizer: Any optimizer of torch or of the user.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._has_kernel: bool | None = None if type(optimizer) in _KERNELS else False
        self._wrapped: Callable[..., Any] | None = None
        self._bare: Callable[..., Any] | None = None

    def zero_grad(self) -> None:
        """Set the gradients to None, as the optimizer's `zero_grad` does."""
        optimizer = self._optimizer
        replaced = type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer)
        if replaced or _profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = None

    def __call__(self) -> None:
        """Do one step of the optimizer."""
        if self._has_kernel is None:  # only now: lazy parameters have no shape before the first forward pass
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
        """Do the step, without torch's wrappers if `as_made`: a step of torch's class without hooks."""
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
        if "step" in vars(optimizer):  # wrapped by a scheduler, which checks this attribute
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with torch.no_grad():
            self._bare(optimizer)

    def _by_kernel(self, group: dict[str, Any]) -> bool:
        """Whether kernel and loop compute the same; SGD's kernel starts momentum for all parameters or none."""
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
    """A class's `step` without torch's wrappers; None if there is any other wrapper."""
    if getattr(step, "__code__", None) is _HOOKS:
        step = step.__wrapped__
    return step.__wrapped__ if getattr(step, "__code__", None) is _NO_GRAD else None


def _is_countable(parameter: Tensor, count: object) -> bool:
    """Whether a GPU kernel can read a parameter's count of updates: it needs float32 on the device."""
    if not isinstance(count, Tensor):
        return True
    return count.device == parameter.device and count.dtype == torch.float32


class MemberLoop:
    """Optimizers without a fused rule: any class, any hook, one after another.

    Each optimizer gets its rows of the gradients for its step and updates its own parameters, which are views of the
    array's. Its state is not stacked.

    Args:
        members: Optimizers of consecutive members.
        start: Index in the array of the first member.
        columns: Parameters of each member.

    Raises:
        FusionError: An optimizer needs a closure, which would run a single member, or sparse gradients.
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
        """Always true: nothing read from the members' parameter groups is stored."""
        return True

    def step(self, missing: Mapping[Tensor, Collection[int]]) -> None:
        """Do the step of every member.

        Args:
            missing: Members without gradients, as in `ParamGroupBatch.step`.

        Raises:
            FusionError: An optimizer moved its parameters in memory, out of the array.
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
