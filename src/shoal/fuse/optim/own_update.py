"""The step of one optimizer by itself, by torch's fused kernels where it has them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.optim.table import steps_as_made

__all__ = ["OwnUpdate"]

_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""By exact class: a subclass may do anything in its `step`."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class OwnUpdate:
    """Lets an optimizer step.

    Where neither `foreach` nor `fused` was asked for, torch loops over the parameters of a CPU, which takes ten times
    as long for small ones as a fused kernel does. The optimizer is told to use that for its own step, and is as it was
    before and after it.

    Args:
        optimizer: any of torch's or of the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._has_kernel: bool | None = None if type(optimizer) in _KERNELS else False

    def __call__(self) -> None:
        """One step."""
        if self._has_kernel is None:  # not before: lazy parameters have no shape until a model has run
            params = [each for group in self._optimizer.param_groups for each in group["params"]]
            self._has_kernel = all(
                each.dtype in _DTYPES and torch.empty_like(each).stride() == each.stride() for each in params
            )  # with no gaps in memory
        chosen = []
        if self._has_kernel and steps_as_made(self._optimizer):
            chosen = [group for group in self._optimizer.param_groups if self._by_kernel(group)]
        for group in chosen:
            group["fused"] = True
        try:
            self._optimizer.step()
        finally:
            for group in chosen:
                group["fused"] = None

    def _by_kernel(self, group: dict[str, Any]) -> bool:
        """Whether the kernel does what the loop would; that of SGD begins momentum for all or none."""
        if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
            return False
        if group.get("capturable"):
            return False
        updated = [each for each in group["params"] if each.grad is not None]
        begun = [each in self._optimizer.state for each in updated]
        if group.get("momentum") and not all(begun):
            return False
        counts = [self._optimizer.state[each].get("step") for each, has in zip(updated, begun, strict=True) if has]
        return all(each.grad.stride() == each.stride() for each in updated) and all(map(_is_countable, updated, counts))


def _is_countable(parameter: Tensor, count: object) -> bool:
    """Whether a kernel can read a parameter's count of updates: a GPU's reads float32 in its own memory only."""
    if parameter.device.type == "cpu" or not isinstance(count, Tensor):
        return True
    return count.device == parameter.device and count.dtype == torch.float32
