"""Functions that ask how a tensor lies in memory, or put it in order there.

A member alone has no axis B: where B lies next to an axis of its own, [N, B*C, ...], its memory has no such gaps.
"""

from typing import Any

import torch
from torch import Tensor

from shoal.fuse.aliasing import note_copy
from shoal.fuse.rules.base import Rule
from shoal.fuse.rules.elementwise import like
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _in_order(data: Tensor, *args: Any, **kwargs: Any) -> bool:
    """What `is_contiguous` is for a member alone, of [B, *shape]: its strides are those of all, without B's share."""
    members, step = data.shape[0], data.stride(0)
    strides = [
        stride // members if 0 < step < stride and stride % members == 0 else stride for stride in data.stride()[1:]
    ]
    return torch.empty_strided(data.shape[1:], strides, device="meta").is_contiguous(*args, **kwargs)


def _is_contiguous(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> bool:
    return _in_order(x.whole, *args, **kwargs)


def _contiguous(func: Any, x: Stacked, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """The tensor itself where a member alone is given it back."""
    data = x.whole
    if memory_format is torch.contiguous_format:
        if data.is_contiguous() or _in_order(data):
            return x
        copied = data.contiguous()
        note_copy(data, copied)
        return Stacked(copied)
    if x.dim() != _RANKS.get(memory_format):
        return NotImplemented
    if _in_order(data, memory_format=memory_format):
        return x
    return Stacked(data.movedim(2, -1).contiguous().movedim(-1, 2))


def _to(func: Any, x: Any, *args: Any, memory_format: Any = torch.preserve_format, **kwargs: Any) -> Any:
    result = like(func, x, *args, **kwargs)
    if result is not x or not isinstance(x, Stacked) or memory_format is torch.preserve_format:
        return result
    return _contiguous(func, x, memory_format)


_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}

RULES = (
    Rule.direct(_is_contiguous, Tensor.is_contiguous),
    Rule.direct(_contiguous, Tensor.contiguous),
    Rule.direct(_to, Tensor.to),
)
