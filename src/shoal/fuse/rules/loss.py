"""Losses: computed per sample for all members at once, then reduced within each member."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.elementwise import align
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


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
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> Any:
    if size_average is not None or reduce is not None or not isinstance(input, Stacked) or input.dim() < 2:
        return NotImplemented
    if isinstance(weight, Stacked) or isinstance(label_smoothing, Tensor):
        return NotImplemented
    if weight is not None and label_smoothing > 0:
        return NotImplemented
    members = len(input.whole)
    labels = target.whole if isinstance(target, Stacked) else target.unsqueeze(0)
    losses = F.cross_entropy(
        input.whole.flatten(0, 1),
        labels.expand(members, *target.shape).flatten(0, 1),
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        return Stacked(losses.view(*input.whole.shape[:2], *losses.shape[1:]))
    losses = losses.view(members, -1)
    if reduction != "mean" or labels.is_floating_point():
        if reduction == "mean":  # of class probabilities: over samples and places
            return Stacked(losses.mean(1))
        return Stacked(_reduce(losses, reduction))
    return Stacked(losses.sum(1) / _weight_sum(labels, weight, ignore_index).flatten(1).sum(1))


def _weight_sum(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What each label counts for in a mean: its class weight, and nothing where it is ignored."""
    counted = labels != ignore_index
    if weight is None:
        return counted
    return torch.where(counted, weight[labels.where(counted, 0)], 0)


def _per_element(
    func: Any,
    input: Any,
    target: Any,
    *args: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    **kwargs: Any,
) -> Any:
    """A loss of pairs of elements."""
    if any(arg is not None for arg in (*args, size_average, reduce)) or input.shape != target.shape:
        return NotImplemented
    if reduction == "batchmean" or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    data = align((input, target))
    members = len(next(value for value in (input, target) if isinstance(value, Stacked)).whole)
    whole = [value.expand(members, *input.shape) for value in data]
    return Stacked(_reduce(func(*whole, **kwargs, reduction="none"), reduction))


_PER_ELEMENT = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.soft_margin_loss,
)
RULES: dict[Any, Any] = {F.cross_entropy: _cross_entropy, **dict.fromkeys(_PER_ELEMENT, _per_element)}
