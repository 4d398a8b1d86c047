"""Losses: computed per sample for all members at once, then reduced within each member."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.elementwise import align
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _whole(value: Any, members: int) -> Tensor:
    return value.all if isinstance(value, Stacked) else value.expand(members, *value.shape)


def _reduce(values: Tensor, reduction: str) -> Tensor:
    """[B, ...] -> [B], or as it is."""
    if reduction == "none":
        return values
    flat = values.reshape(len(values), -1)
    if reduction == "mean":
        return flat.mean(1)
    if reduction == "sum":
        return flat.sum(1)
    raise ValueError(f"{reduction} is not a valid value for reduction")


def _cross_entropy(
    func: Any,
    input: Any,  # noqa: A002
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> Any:
    if size_average is not None or reduce is not None or isinstance(weight, Stacked) or isinstance(label_smoothing, Tensor):
        return NotImplemented
    if not isinstance(input, Stacked) or input.dim() < 2:
        return NotImplemented
    members = len(input.all)
    labels = _whole(target, members).flatten(0, 1)
    losses = F.cross_entropy(
        input.all.flatten(0, 1),
        labels,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    losses = losses.view(members, -1) if reduction != "none" else losses.unflatten(0, (members, -1))
    if reduction != "mean" or labels.is_floating_point():
        if reduction == "mean":  # of class probabilities: over samples
            return Stacked(losses.mean(1))
        return Stacked(_reduce(losses, reduction))
    return Stacked(losses.sum(1) / _weight_sum(labels, weight, ignore_index).view(members, -1).sum(1))


def _weight_sum(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What each label counts for in a mean: its class weight, and nothing where it is ignored."""
    counted = labels != ignore_index
    if weight is None:
        return counted
    return torch.where(counted, weight[labels.where(counted, 0)], 0)


def _mse_loss(
    func: Any,
    input: Any,  # noqa: A002
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    if size_average is not None or reduce is not None or weight is not None or input.shape != target.shape:
        return NotImplemented
    data = align((input, target))
    if data is None:
        return NotImplemented
    return Stacked(_reduce((data[0] - data[1]).square(), reduction))


RULES = {F.cross_entropy: _cross_entropy, F.mse_loss: _mse_loss}
