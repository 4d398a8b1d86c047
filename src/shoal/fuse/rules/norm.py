"""Normalisations: batch norm over B·C channels, layer norm before the members' own scale and shift."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.conv import merge_channels, split_channels
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _flat(value: Any, members: int) -> Tensor | None:
    """[B, C] -> [B*C], a view of a member's statistics or weights; a shared [C] is repeated."""
    if value is None:
        return None
    data: Tensor = value.all if isinstance(value, Stacked) else value.expand(members, *value.shape)
    return data.reshape(-1)


def _batch_norm(
    func: Any,
    input: Any,  # noqa: A002
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Any:
    if not isinstance(input, Stacked) or isinstance(momentum, Tensor) or isinstance(eps, Tensor):
        return NotImplemented
    if training and isinstance(running_mean, Tensor) and not isinstance(running_mean, Stacked):
        return NotImplemented  # would update statistics that all members share
    members = len(input.all)
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    statistics = (_flat(running_mean, members), _flat(running_var, members))
    affine = (_flat(weight, members), _flat(bias, members))
    out = F.batch_norm(merge_channels(input.all), *statistics, *affine, training, momentum, eps)
    return Stacked(split_channels(out, members))


def _layer_norm(
    func: Any,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
) -> Any:
    if not isinstance(input, Stacked) or isinstance(eps, Tensor):
        return NotImplemented
    out = F.layer_norm(input.all, normalized_shape, eps=eps)
    if weight is not None:
        out = out * _over_lead(weight, input)
    if bias is not None:
        out = out + _over_lead(bias, input)
    return Stacked(out)


def _over_lead(value: Any, like: Stacked) -> Tensor:
    """[B, *E] -> [B, 1, ..., *E], to be broadcast over all but the normalised axes."""
    if not isinstance(value, Stacked):
        return value  # type: ignore[no-any-return]
    data = value.all
    return data.view(len(data), *[1] * (like.dim() - value.dim()), *data.shape[1:])


RULES = {F.batch_norm: _batch_norm, F.layer_norm: _layer_norm, torch.layer_norm: _layer_norm}
