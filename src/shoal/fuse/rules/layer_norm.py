"""Normalisations of the last axes: at once for all members, then their own scale and shift."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.autotune import fastest
from shoal.fuse.rules.base import Rule
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]

_LARGE = 2**13
"""Elements of a member. Below, all at once has always been faster than a loop, and looking up costs more."""


def _at_once(x: Tensor, weight: Any, bias: Any, shape: Sequence[int], eps: float) -> Tensor:
    """Scale and shift [B, 1, ..., *shape], or what broadcasts to it, and not both of them None."""
    out = F.layer_norm(x, shape, eps=eps)
    if weight is None or bias is None:
        scaled: Tensor = out + bias if weight is None else out * weight
    else:
        scaled = torch.addcmul(bias, out, weight)
    return scaled.to(out.dtype)


def _loop(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int], eps: float) -> Tensor:
    """Scale and shift of each member's own."""
    columns = [[None] * len(x) if t is None else t.reshape(len(x), *shape).unbind(0) for t in (weight, bias)]
    return torch.stack([F.layer_norm(own, shape, w, b, eps) for own, w, b in zip(x.unbind(0), *columns, strict=True)])


def _layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if isinstance(eps, Stacked):
        return NotImplemented
    data = input.whole if isinstance(input, Stacked) else input
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        return Stacked(F.layer_norm(data, normalized_shape, weight, bias, eps))
    shape = tuple(normalized_shape)
    tensors = (data, _over_lead(weight, input), _over_lead(bias, input))
    own = isinstance(weight, Stacked) and (bias is None or isinstance(bias, Stacked)) and isinstance(input, Stacked)
    if not own or input.numel() < _LARGE:
        return Stacked(_at_once(*tensors, shape, eps))
    ways = {"at once": partial(_at_once, shape=shape, eps=eps), "loop": partial(_loop, shape=shape, eps=eps)}
    return Stacked(fastest("layer_norm", ways, tensors, (shape, eps)))


def _over_lead(value: Any, like: Tensor) -> Any:
    """[B, *E] -> [B, 1, ..., *E], to be broadcast over all but the normalised axes; what is shared stays as it is."""
    if not isinstance(value, Stacked):
        return value
    data = value.whole
    return data.view(len(data), *[1] * (like.dim() - value.dim()), *data.shape[1:])


RULES = (Rule((F.layer_norm, torch.layer_norm), {"at once": _at_once, "loop": _loop}, run=_layer_norm),)
