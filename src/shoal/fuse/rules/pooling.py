"""Pooling, padding and interpolation: no parameters, so B joins the batch or the channels, whichever copies nothing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from shoal.fuse.rules.conv import merge_channels, split_channels
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]

_NAMES = """
    max_pool{}d avg_pool{}d lp_pool{}d adaptive_max_pool{}d adaptive_avg_pool{}d
    max_pool{}d_with_indices adaptive_max_pool{}d_with_indices
""".split()


def _pool(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    spatial = int(next(char for char in func.__name__ if char.isdigit())) if func not in _SPATIAL else _SPATIAL[func]
    if not isinstance(input, Stacked) or input.dim() != spatial + 2:
        return NotImplemented
    members = len(input.all)
    if input.all.transpose(0, 1).is_contiguous():
        out = func(merge_channels(input.all), *args, **kwargs)
        return pytree.tree_map(lambda part: Stacked(split_channels(part, members)), out)
    out = func(input.all.flatten(0, 1), *args, **kwargs)
    return pytree.tree_map(lambda part: Stacked(part.unflatten(0, (members, -1))), out)


def _homes(name: str) -> list[Any]:
    return [getattr(home, name) for home in (torch, F, torch._C._nn) if hasattr(home, name)]


_SPATIAL: dict[Any, int] = {
    func: spatial for spatial in (1, 2, 3) for name in _NAMES for func in _homes(name.format(spatial))
}
RULES: dict[Any, Any] = dict.fromkeys(_SPATIAL, _pool)
