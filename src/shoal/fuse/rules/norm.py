"""Normalisations: batch norm over B·C channels, layer norm before the members' own scale and shift."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.conv import merge_channels, split_channels
from shoal.fuse.stacked import NeedsMemberError, Stacked, count

__all__ = ["RULES"]


def _flat(value: Any, members: int) -> Tensor | None:
    """[B, C] -> [B*C], a view of members' statistics or weights; a shared [C] is repeated."""
    if value is None:
        return None
    return value.whole.view(-1) if isinstance(value, Stacked) else value.expand(members, *value.shape).reshape(-1)


def _batch_norm(
    func: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Any:
    if isinstance(momentum, Tensor) or isinstance(eps, Tensor) or input.dim() < 2:
        return NotImplemented
    if training and isinstance(running_mean, Tensor) and not isinstance(running_mean, Stacked):
        raise NeedsMemberError("batch_norm updates statistics that all members share")
    members = count((input, running_mean, running_var, weight, bias)) or 1
    data = input.whole if isinstance(input, Stacked) else input.expand(members, *input.shape)
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    statistics = (_flat(running_mean, members), _flat(running_var, members))
    affine = (_flat(weight, members), _flat(bias, members))
    out = F.batch_norm(merge_channels(data), *statistics, *affine, training, momentum, eps)
    return Stacked(split_channels(out, members))


def _layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if isinstance(eps, Tensor):
        return NotImplemented
    data = input.whole if isinstance(input, Stacked) else input
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        return Stacked(F.layer_norm(data, normalized_shape, weight, bias, eps))
    out = F.layer_norm(data, normalized_shape, eps=eps)
    scale, shift = _over_lead(weight, input), _over_lead(bias, input)
    if scale is not None and shift is not None:
        return Stacked(torch.addcmul(shift, out, scale))
    if scale is not None:
        out = out * scale
    return Stacked(out if shift is None else out + shift)


def _over_lead(value: Any, like: Tensor) -> Tensor | None:
    """[B, *E] -> [B, 1, ..., *E], to be broadcast over all but the normalised axes."""
    if not isinstance(value, Stacked):
        return value  # type: ignore[no-any-return]
    data = value.whole
    return data.view(len(data), *[1] * (like.dim() - value.dim()), *data.shape[1:])


RULES: dict[Any, Any] = {F.batch_norm: _batch_norm, F.layer_norm: _layer_norm, torch.layer_norm: _layer_norm}
