"""Parts of tensors, read and written."""

from typing import Any

import torch
from torch import Tensor

from shoal.fuse.rules.axes import axis
from shoal.fuse.rules.elementwise import align
from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["RULES"]

_BASIC = (int, slice, type(None), type(Ellipsis))


def _index(x: Any, key: Any, advanced: int) -> tuple[Any, ...] | None:
    """The index into all members' data, if it is the same for all members.

    Args:
        x: what is indexed.
        key: the member's index.
        advanced: how many tensors or lists it may hold; two that stand apart would move axes to the front, before B.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if not isinstance(x, Stacked):
        return None
    for part in keys:
        if isinstance(part, (bool, Stacked)):
            return None
        if not isinstance(part, _BASIC):
            advanced -= 1
            if advanced < 0 or not isinstance(part, (Tensor, list)):
                return None
            if any(isinstance(other, int) for other in keys):  # which counts as a tensor too
                return None
    return (slice(None), *keys)


def _get(func: Any, x: Any, key: Any) -> Any:
    index = _index(x, key, advanced=1)
    return NotImplemented if index is None else Stacked(x.whole[index])


def _set(func: Any, x: Any, key: Any, value: Any) -> Any:
    if not isinstance(x, Stacked):
        raise NeedsMemberError("an assignment to a part of a tensor that all members share")
    index = _index(x, key, advanced=0)
    if index is None:
        return NotImplemented
    part = Stacked(x.whole[index])
    data = align((part, value))
    if data[0].dim() != part.whole.dim():
        return NotImplemented
    part.whole.copy_(data[1]) if isinstance(value, Tensor) else part.whole.fill_(value)
    return None


def _select(func: Any, x: Stacked, dim: int, index: Any) -> Any:
    return Stacked(x.whole.select(axis(x, dim), index)) if isinstance(index, int) else NotImplemented


def _narrow(func: Any, x: Stacked, dim: int, start: Any, length: int) -> Any:
    return Stacked(x.whole.narrow(axis(x, dim), start, length)) if isinstance(start, int) else NotImplemented


RULES: dict[Any, Any] = {
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    torch.select: _select,
    Tensor.select: _select,
    torch.narrow: _narrow,
    Tensor.narrow: _narrow,
}
