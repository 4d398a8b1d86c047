"""A stacked parameter as its members' own, for functions that run member by member."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["rows"]


class _Rows(torch.autograd.Function):
    """Rows that share memory but are no views to autograd: a member's may be changed in place like any tensor."""

    @staticmethod
    def forward(ctx: Any, data: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(row.data for row in data.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:
        like = next(grad for grad in grads if grad is not None)
        return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])


def rows(data: Tensor) -> tuple[Tensor, ...]:
    """The members' tensors [*shape] of a stacked one [B, *shape]; their gradients go to it."""
    if len(data) == 1:
        return (data.squeeze(0),)  # a view like any other, and faster
    return _Rows.apply(data) if data.requires_grad else data.unbind(0)  # type: ignore[no-untyped-call]
