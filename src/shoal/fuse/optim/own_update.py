"""The step of one optimizer by itself, by torch's fused kernels where it has them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from shoal.fuse.optim.table import steps_as_made

__all__ = ["OwnUpdate"]

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
