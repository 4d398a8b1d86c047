"""Pooling and padding: no parameters, so B joins the batch or the channels, whichever copies nothing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.rules.conv import merge_channels, split_channels
from shoal.fuse.stacked import Stacked

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
    if not isinstance(input, Stacked) or input.dim() != _SPATIAL[func] + 2:
        return NotImplemented
    members = len(input.whole)
    if input.whole.transpose(0, 1).is_contiguous():
        out = func(merge_channels(input.whole), *args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda part: Stacked(split_channels(part, members)), out)
    return _over_samples(func, input, *args, **kwargs)


def _over_samples(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Any:
    """B joins the batch."""
    out = func(input.whole.flatten(0, 1), *args, **kwargs)
    shape = input.whole.shape[:2]
    return pytree.tree_map_only(Tensor, lambda part: Stacked(part.view(*shape, *part.shape[1:])), out)


def _pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    if not isinstance(input, Stacked) or isinstance(value, Tensor):
        return NotImplemented
    if mode == "constant":  # any axes, counted from the last
        return Stacked(func(input.whole, pad, mode, value)) if len(pad) <= 2 * input.dim() else NotImplemented
    return _over_samples(func, input, pad, mode) if input.dim() == len(pad) // 2 + 2 else NotImplemented


def _interpolate(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    return _over_samples(func, input, *args, **kwargs)


def _homes(name: str) -> list[Any]:
    return [getattr(home, name) for home in (torch, F, torch._C._nn) if hasattr(home, name)]


_SPATIAL: dict[Any, int] = {
    func: spatial for spatial in (1, 2, 3) for name in _NAMES for func in _homes(name.format(spatial))
}
RULES: dict[Any, Any] = {**dict.fromkeys(_SPATIAL, _pool), F.pad: _pad, F.interpolate: _interpolate}
