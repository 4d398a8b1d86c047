"""Pooling: of each channel by itself."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.rules.base import Layout, Rule, named
from shoal.fuse.rules.channelwise import by_planes
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
    samples = input.dim() - _SPATIAL[func] - 1
    if not isinstance(input, Stacked) or samples not in (0, 1):
        return NotImplemented
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    if samples:
        return by_planes(func, input, *args, **kwargs)
    return pytree.tree_map_only(Tensor, Stacked, func(input.whole, *args, **kwargs))  # one sample: B is its batch


_SPATIAL = {
    func: spatial
    for spatial in (1, 2, 3)
    for name in _NAMES
    for func in named(name.format(spatial), torch, F, torch._C._nn)
}
RULES = (Rule.direct(_pool, *_SPATIAL, gives=Layout.CHANNEL_MAJOR),)
