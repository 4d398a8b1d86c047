"""Pooling: of each channel by itself."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.rules.planes import by_planes
from shoal.fuse.stacked import Stacked, count

__all__ = ["RULES"]

_NAMES = (
    "max_pool{}d",
    "avg_pool{}d",
    "lp_pool{}d",
    "adaptive_max_pool{}d",
    "adaptive_avg_pool{}d",
    "max_pool{}d_with_indices",
    "adaptive_max_pool{}d_with_indices",
)


def _pool(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    samples = input.dim() - _SPATIAL[func] - 1
    if not isinstance(input, Stacked) or samples not in (0, 1):
        return NotImplemented
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    if samples:
        return by_planes(func, input, *args, **kwargs)
    return pytree.tree_map_only(Tensor, Stacked, func(input.whole, *args, **kwargs))  # one sample: B is its batch


def _unpool(func: Any, input: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    """Indices are places within a plane, so B joins the batch."""
    if input.dim() != _UNPOOLED[func] + 2:
        return NotImplemented
    members = count((input, indices)) or 1
    wholes = [x.whole if isinstance(x, Stacked) else x.expand(members, *x.shape) for x in (input, indices)]
    out = func(*(whole.flatten(0, 1) for whole in wholes), *args, **kwargs)
    return Stacked(out.unflatten(0, wholes[0].shape[:2]))


def _homes(name: str) -> list[Any]:
    return [getattr(home, name) for home in (torch, F, torch._C._nn) if hasattr(home, name)]


_SPATIAL: dict[Any, int] = {
    func: spatial for spatial in (1, 2, 3) for name in _NAMES for func in _homes(name.format(spatial))
}
_UNPOOLED: dict[Any, int] = {getattr(F, f"max_unpool{spatial}d"): spatial for spatial in (1, 2, 3)}
RULES: dict[Any, Any] = {**dict.fromkeys(_SPATIAL, _pool), **dict.fromkeys(_UNPOOLED, _unpool)}
