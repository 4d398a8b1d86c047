"""Stacked tensors and their rows: apart for functions that run member by member, and joined again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.fuse.missing_grads import note_backward

__all__ = ["joined", "memory_of", "rows"]


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
            note_backward(ctx.leaf, (b for b, grad in enumerate(grads) if grad is None))
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
