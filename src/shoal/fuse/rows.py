"""Rows of stacked tensors: views for single members, joining of members' tensors, rows without a gradient.

Where members run by themselves, one may leave out a parameter that another uses. Alone its gradient would be None, and
an optimizer would leave the parameter as it is: no momentum, no weight decay, no count. The stacked gradient has a row
of zeros for it all the same, and this module notes that the row stands for no gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["absent", "forget", "joined", "memory_of", "missing", "note_row", "rows"]


class _Rows(torch.autograd.Function):
    """Rows that share memory but are no views to autograd: a member's may be changed in place like any tensor."""

    @staticmethod
    def forward(ctx: Any, data: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.leaf = data if data.is_leaf else None
        return tuple(row.data for row in data.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:
        if ctx.leaf is not None:
            _note_backward(ctx.leaf, (b for b, grad in enumerate(grads) if grad is None))
        like = next(grad for grad in grads if grad is not None)
        return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])


def rows(data: Tensor) -> tuple[Tensor, ...]:
    """The members' tensors [*shape] of a stacked one [B, *shape]; their gradients go to it."""
    if len(data) == 1:
        return (data.squeeze(0),)  # a view like any other, and faster
    return _Rows.apply(data) if data.requires_grad else data.unbind(0)  # type: ignore[no-untyped-call]


def joined(tensors: Sequence[Tensor], move: bool = False) -> Tensor:
    """Tensors of one shape and type as one, [B, *shape], whose rows have their strides.

    A view if they lie one after another in memory, as the rows of a stacked tensor do, or a run of them; else a copy.

    Args:
        tensors: at least one.
        move: make each a view of its row as soon as that is copied, so that its own memory is free for the next.
    """
    first = tensors[0].detach()
    size, strides = first.numel(), first.stride()
    if not size or not all(_dense(t) and t.stride() == strides and t.dtype == first.dtype for t in tensors):
        strides = torch.empty(first.shape, device="meta").stride()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    shape, steps = (len(tensors), *first.shape), (size, *strides)
    if size and all(
        t.untyped_storage().data_ptr() == memory and t.storage_offset() == begin + b * size and t.stride() == strides
        for b, t in enumerate(tensors)
    ):
        return first.as_strided(shape, steps)
    whole = first.new_empty(len(tensors) * size).as_strided(shape, steps)
    del first  # it holds the memory of the first tensor
    for row, tensor in zip(whole.unbind(0), tensors, strict=True):
        row.copy_(tensor.detach())
        if move:
            tensor.data = row
    return whole


def _dense(tensor: Tensor) -> bool:
    """Does it fill its memory without gaps or overlap, in whatever order of axes?"""
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def memory_of(tensor: Tensor) -> int:
    """Where a tensor lies; 0 for those that have no memory, as sparse ones and within transforms of `torch.func`."""
    return tensor.untyped_storage().data_ptr() if torch._C._has_storage(tensor) else 0


_noted_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of a stacked parameter: the rows, and the backward pass that noted them last."""

_NO_PASS = -2
"""Autograd counts its passes from 0, and says -1 outside of one."""


def absent(stacked: Tensor) -> frozenset[int]:
    """The members that have no gradient of a parameter, [B, *shape], of which others have one."""
    if not _noted_rows or stacked.grad is None:
        return frozenset()
    return frozenset(b for b in _noted(stacked)[0] if not stacked.grad[b].any())


def missing(parameters: Iterable[Tensor]) -> dict[Tensor, frozenset[int]]:
    """Of each parameter of which only some members have a gradient, those that have none."""
    return {parameter: rows for parameter in parameters if (rows := absent(parameter))} if _noted_rows else {}


def _note_backward(stacked: Tensor, without: Iterable[int]) -> None:
    """A backward pass is about to add gradients to those of a parameter, but of these members none."""
    rows, now = frozenset(without), torch._C._current_graph_task_id()
    before, task = _noted(stacked)
    if task == now or stacked.grad is not None:
        rows &= before
    _noted_rows[stacked] = rows, now


def note_row(stacked: Tensor, b: int, has: bool) -> None:
    """A member's gradient of a parameter is about to be set, or to be set to None; the others keep what they have."""
    if stacked.grad is not None:
        rows, task = _noted(stacked)
        _noted_rows[stacked] = rows - {b} if has else rows | {b}, task
    elif has:
        _noted_rows[stacked] = frozenset(range(len(stacked))) - {b}, _NO_PASS


def forget(parameters: Iterable[Tensor]) -> None:
    """Parameters that have no gradients now begin anew."""
    if _noted_rows:
        for parameter in parameters:
            if parameter.grad is None and parameter in _noted_rows:
                del _noted_rows[parameter]


def _noted(stacked: Tensor) -> tuple[frozenset[int], int]:
    return _noted_rows.get(stacked, (frozenset(), _NO_PASS))  # type: ignore[no-any-return, no-untyped-call]
