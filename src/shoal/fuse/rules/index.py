"""Parts of tensors, read and written by numbers and slices that all members share; tensors as indices are vmap's."""

from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from shoal.fuse.rules.axes import axis
from shoal.fuse.rules.base import Rule, named
from shoal.fuse.rules.elementwise import align, elementwise
from shoal.fuse.rules.meta import agreed
from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["RULES"]

_BASIC = {int, slice, NoneType, EllipsisType}


def _basic(key: Any) -> tuple[Any, ...] | None:
    """An index of numbers, slices, new axes and an ellipsis, or None; a tensor as an end must be one number."""
    parts = tuple(map(_plain, key)) if type(key) is tuple else (_plain(key),)
    return parts if all(type(part) in _BASIC for part in parts) else None


def _plain(part: Any) -> Any:
    """A slice with ends that all members agree on."""
    if type(part) is slice:
        ends = (part.start, part.stop, part.step)
        if any(isinstance(end, Tensor) for end in ends):
            return slice(*(agreed(end) if isinstance(end, Tensor) else end for end in ends))
    return part


def _get(func: Any, x: Any, key: Any) -> Any:
    basic = _basic(key)
    if basic is None:
        return NotImplemented
    return Stacked(x.whole[(slice(None), *basic)]) if isinstance(x, Stacked) else x[basic]


def _set(func: Any, x: Any, key: Any, value: Any) -> Any:
    if not isinstance(x, Stacked):
        raise NeedsMemberError("an assignment to a part of a tensor that all members share")
    if isinstance(key, Tensor) and key.dtype == torch.bool and key.dim() and not isinstance(value, Tensor):
        mask = key.whole if isinstance(key, Stacked) else key.unsqueeze(0)
        x.whole.masked_fill_(mask.reshape(*mask.shape, *[1] * (x.dim() - key.dim())), value)
        return None
    basic = _basic(key)
    if basic is None:
        return NotImplemented
    part = x.whole[(slice(None), *basic)]
    data = align((Stacked(part), value))
    if data is None or data[0].dim() != part.dim():
        return NotImplemented
    part.copy_(data[1]) if isinstance(value, Tensor) else part.fill_(value)
    return None


def _select(func: Any, x: Stacked, dim: int, index: Any) -> Any:
    return Stacked(x.whole.select(axis(x, dim), index)) if isinstance(index, int) else NotImplemented


def _narrow(func: Any, x: Stacked, dim: int, start: Any, length: int) -> Any:
    return Stacked(x.whole.narrow(axis(x, dim), start, length)) if isinstance(start, int) else NotImplemented


def _where(func: Any, condition: Any, input: Any = None, other: Any = None) -> Any:
    """The condition alone asks where it holds, which is each member's own."""
    return NotImplemented if input is None else elementwise(func, condition, input, other)


RULES = (
    Rule.direct(_get, Tensor.__getitem__),
    Rule.direct(_set, Tensor.__setitem__),
    Rule.direct(_select, *named("select")),
    Rule.direct(_narrow, *named("narrow")),
    Rule.direct(_where, *named("where")),
)
