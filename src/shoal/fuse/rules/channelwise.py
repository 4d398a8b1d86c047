"""Rules for channelwise functions: pooling, padding, interpolation.

B is merged into the channel axis if this copies nothing, else into the batch axis.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.rules.base import Layout, Rule, channel_major, functions_named, merge_channels, split_channels
from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "by_samples"]


_POOLING = (
    "max_pool{}d",
    "avg_pool{}d",
    "lp_pool{}d",
    "adaptive_max_pool{}d",
    "adaptive_avg_pool{}d",
    "max_pool{}d_with_indices",
    "adaptive_max_pool{}d_with_indices",
)


def _by_channels(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Any:
    """Apply a function of single channels, or of groups of adjacent channels, to members' [N, C, ...]."""
    data = input.whole
    if channel_major(data):
        members = len(data)
        out = func(merge_channels(data), *args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda part: Stacked(split_channels(part, members)), out)
    return by_samples(func, input, *args, **kwargs)


def by_samples(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Any:
    """Apply a function of single samples to members' [N, ...]."""
    out = func(input.whole.flatten(0, 1), *args, **kwargs)
    shape = input.whole.shape[:2]
    return pytree.tree_map_only(Tensor, lambda part: Stacked(part.unflatten(0, shape)), out)


def _pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    if not isinstance(input, Stacked) or isinstance(value, Tensor):
        return NotImplemented
    padded = len(pad) // 2  # number of axes, from the last
    if padded <= input.dim() - 2:
        return _by_channels(func, input, pad, mode, value)
    if padded == input.dim() - 1 or (
        mode == "constant" and padded == input.dim()
    ):  # a single sample per member, so B is the batch axis
        return Stacked(func(input.whole, pad, mode, value))
    return NotImplemented


def _interpolate(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    return _by_channels(func, input, *args, **kwargs) if isinstance(input, Stacked) else NotImplemented


def _pool(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    samples = input.dim() - _SPATIAL[func] - 1
    if not isinstance(input, Stacked) or samples not in (0, 1):
        return NotImplemented
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    if samples:
        return _by_channels(func, input, *args, **kwargs)
    return pytree.tree_map_only(
        Tensor, Stacked, func(input.whole, *args, **kwargs)
    )  # a single sample per member, so B is the batch axis


_SPATIAL = {
    func: spatial
    for spatial in (1, 2, 3)
    for name in _POOLING
    for func in functions_named(name.format(spatial), torch, F, torch._C._nn)
}


RULES = (
    Rule.direct(_pad, F.pad, output_layout=Layout.CHANNEL_MAJOR),
    Rule.direct(_interpolate, F.interpolate, output_layout=Layout.CHANNEL_MAJOR),
    Rule.direct(_pool, *_SPATIAL, output_layout=Layout.CHANNEL_MAJOR),
)
