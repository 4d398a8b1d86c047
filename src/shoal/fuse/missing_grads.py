"""Rows of stacked gradients that stand for no gradient at all.

Where members run by themselves, one may leave out a parameter that another uses. Alone its gradient would be None, and
an optimizer would leave the parameter as it is: no momentum, no weight decay, no count. A stacked gradient has a row
for it all the same, of zeros, which is noted here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["absent", "forget", "missing", "note_backward", "note_row"]

_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of a stacked parameter: the rows, and the backward pass that noted them last."""

_NO_PASS = -2
"""Autograd counts its passes from 0, and says -1 outside of one."""


def absent(stacked: Tensor) -> frozenset[int]:
    """The members that have no gradient of a parameter, [B, *shape], of which others have one."""
    if not _rows or stacked.grad is None:
        return frozenset()
    return frozenset(b for b in _noted(stacked)[0] if not stacked.grad[b].any())


def missing(parameters: Iterable[Tensor]) -> dict[Tensor, frozenset[int]]:
    """Of each parameter of which only some members have a gradient, those that have none."""
    return {parameter: rows for parameter in parameters if (rows := absent(parameter))} if _rows else {}


def note_backward(stacked: Tensor, without: Iterable[int]) -> None:
    """A backward pass is about to add gradients to those of a parameter, but of these members none."""
    rows, now = frozenset(without), torch._C._current_graph_task_id()
    before, task = _noted(stacked)
    if task == now or stacked.grad is not None:
        rows &= before
    _rows[stacked] = rows, now


def note_row(stacked: Tensor, b: int, has: bool) -> None:
    """A member's gradient of a parameter is about to be set, or to be set to None; the others keep what they have."""
    if stacked.grad is not None:
        rows, task = _noted(stacked)
        _rows[stacked] = rows - {b} if has else rows | {b}, task
    elif has:
        _rows[stacked] = frozenset(range(len(stacked))) - {b}, _NO_PASS


def forget(parameters: Iterable[Tensor]) -> None:
    """Parameters that have no gradients now begin anew."""
    if _rows:
        for parameter in parameters:
            if parameter.grad is None and parameter in _rows:
                del _rows[parameter]


def _noted(stacked: Tensor) -> tuple[frozenset[int], int]:
    return _rows.get(stacked, (frozenset(), _NO_PASS))  # type: ignore[no-any-return, no-untyped-call]
