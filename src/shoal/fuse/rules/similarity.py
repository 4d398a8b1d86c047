"""Similarity and distance of vectors along an axis."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.axes import axis_of
from shoal.fuse.rules.elementwise import align
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _cosine_similarity(func: Any, x1: Any, x2: Any, dim: int = 1, eps: Any = 1e-8) -> Any:
    if isinstance(eps, Stacked):
        raise NotImplementedError("members' own eps")
    return Stacked(func(*align((x1, x2)), axis_of(dim, max(x1.dim(), x2.dim())), eps))


def _pairwise_distance(func: Any, x1: Any, x2: Any, p: Any = 2.0, eps: Any = 1e-6, keepdim: bool = False) -> Any:
    if isinstance(p, Tensor) or isinstance(eps, Tensor):
        raise NotImplementedError("members' own numbers")
    if x1.dim() == x2.dim() == 0:
        return NotImplemented
    return Stacked(func(*align((x1, x2)), p, eps, keepdim))


RULES: dict[Any, Any] = {F.cosine_similarity: _cosine_similarity, F.pairwise_distance: _pairwise_distance}
