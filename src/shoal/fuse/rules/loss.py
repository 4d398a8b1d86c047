"""Rules for losses: computed per element or per sample for all members at once, then reduced within each member."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.base import Rule, stacked_data
from shoal.fuse.rules.elementwise import align
from shoal.fuse.shard import active_shard
from shoal.fuse.stacked import Stacked, member_count

__all__ = ["RULES", "mean_of_labelled", "reduce_losses"]


def reduce_losses(values: Tensor, reduction: str) -> Tensor:
    """Reduce losses [B, ...] within each member to [B]; unchanged if `reduction` is "none"."""
    if reduction == "none":
        return values
    flat = values.reshape(len(values), -1)
    if reduction == "mean":
        return flat.mean(1)
    if reduction == "sum":
        return flat.sum(1)
    raise ValueError(f"{reduction} is not a valid value for reduction")


def _per_element(
    func: Any,
    input: Any,
    target: Any,
    *,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
    pos_weight: Any = None,
    **numbers: Any,
) -> Any:
    if size_average is not None or reduce is not None or input.shape != target.shape:
        return NotImplemented
    if any(isinstance(value, Tensor) for value in numbers.values()):
        return NotImplemented
    weights = {name: w for name, w in (("weight", weight), ("pos_weight", pos_weight)) if w is not None}
    if weights and (func not in _WEIGHTED or any(w.dim() > input.dim() for w in weights.values())):
        return NotImplemented
    members = member_count((input, target, weights)) or 1
    aligned = align((input, target, *weights.values()))
    if aligned is None:
        return NotImplemented
    x, y, *scales = aligned
    x, y = (value.expand(members, *input.shape) for value in (x, y))
    values = func(x, y, reduction="none", **dict(zip(weights, scales, strict=True)), **numbers)
    if reduction == "batchmean" and func is F.kl_div:
        return Stacked(reduce_losses(values, "sum") / (len(input) if input.dim() else 1))
    return Stacked(reduce_losses(values, reduction))


_WEIGHTED = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
"""Losses with a `weight`, which is applied before the reduction."""

_PER_ELEMENT = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.hinge_embedding_loss,
    *_WEIGHTED,
)


def _class_loss(
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
    if size_average is not None or reduce is not None or not input.dim():
        return NotImplemented
    members = member_count((input, target, weight, label_smoothing)) or 1
    x = stacked_data(input, members)
    y = target.whole if isinstance(target, Stacked) else target.unsqueeze(0)
    unbatched = input.dim() == 1  # no batch axis
    if unbatched:
        x, y = x.unsqueeze(1), y.unsqueeze(1)
    if isinstance(weight, Stacked) or isinstance(label_smoothing, Tensor):
        if not _is_supported(x, y, weight, ignore_index, label_smoothing):
            return NotImplemented
        log_shares = x if func is F.nll_loss else F.log_softmax(x, 2)
        losses = _own_weights(log_shares, y, weight, ignore_index, label_smoothing)
    else:
        options = {"label_smoothing": label_smoothing} if label_smoothing else {}
        flat = y.expand(members, *y.shape[1:]).flatten(0, 1)
        losses = func(x.flatten(0, 1), flat, weight, ignore_index=ignore_index, reduction="none", **options)
        losses = losses.view(*x.shape[:2], *losses.shape[1:])
    if reduction == "mean" and not y.is_floating_point():
        return Stacked(mean_of_labelled(losses, y, weight, ignore_index))
    return Stacked(losses.squeeze(1) if unbatched and reduction == "none" else reduce_losses(losses, reduction))


def mean_of_labelled(losses: Tensor, y: Tensor, weight: Any, ignore_index: int) -> Tensor:
    """Mean over the labels [B or 1, N, ...] that are not ignored, weighted by class, of losses [B, N, ...]: [B]."""
    exact = torch.promote_types(losses.dtype, torch.float32)  # a sum of half-precision numbers may overflow
    divisor = _weight_sum(y, weight, ignore_index, exact)
    if (shard := active_shard()) is not None:
        divisor = divisor.double()
        shard.all_reduce(divisor)
        divisor = (divisor * (shard.rows / shard.total)).to(exact)  # the mean is weighted by the shard's rows later
    mean = losses.flatten(1).sum(1, dtype=exact) / divisor
    return mean.to(losses.dtype)


def _is_supported(x: Tensor, y: Tensor, weight: Any, ignore_index: int, smoothing: Any) -> bool:
    """Whether torch accepts these arguments for one member, and label smoothing is one Python float per member."""
    if isinstance(smoothing, Tensor):
        numbers = smoothing.floats if isinstance(smoothing, Stacked) else None
        if numbers is None or not all(0 <= number <= 1 for number in numbers):
            return False
    if weight is not None and weight.shape != x.shape[2:3]:
        return False
    if y.is_floating_point():
        return ignore_index < 0 and y.shape[1:] == x.shape[1:]
    return y.shape[1:] == (x.shape[1], *x.shape[3:])


def _own_weights(log_shares: Tensor, y: Tensor, weight: Any, ignore_index: int, smoothing: Any) -> Tensor:
    """Losses per sample if members differ in class weights w or in label smoothing ε.

    (1 - ε) Σ_c y_c w_c (-log p_c) + ε / C Σ_c w_c (-log p_c), where a label y stands for y_c = 1."""
    costs = -log_shares
    trailing = [1] * (costs.dim() - 3)
    if weight is not None:
        costs = costs * (weight.whole if isinstance(weight, Stacked) else weight).view(-1, 1, costs.shape[2], *trailing)
    ignored = None
    if y.is_floating_point():
        losses = (costs * y).sum(2)
    else:
        ignored = y == ignore_index
        index = y.masked_fill(ignored, 0).long().expand(len(costs), *y.shape[1:])
        losses = costs.gather(2, index.unsqueeze(2)).squeeze(2)
    if isinstance(smoothing, Stacked):
        rate = smoothing.floats_like(losses).view(-1, 1, *trailing)
        smooth = (1 - rate) * losses + rate * costs.mean(2)
        losses = torch.where(rate > 0, smooth, losses)  # avoids 0 · inf where a logit is -inf
    elif smoothing:
        losses = (1 - smoothing) * losses + smoothing * costs.mean(2)
    return losses if ignored is None else losses.masked_fill(ignored, 0)


def _weight_sum(y: Tensor, weight: Any, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Divisor of a mean over labels [B or 1, N, ...]: the sum of the class weights of labels not ignored, [B or 1]."""
    labels = y.flatten(1)
    counted = labels != ignore_index
    if weight is None:
        return counted.sum(1)
    own = weight.whole if isinstance(weight, Stacked) else weight.unsqueeze(0)
    return torch.take_along_dim(own, labels.where(counted, 0).long(), 1).where(counted, 0).sum(1, dtype=dtype)


RULES = (
    Rule.direct(_per_element, *_PER_ELEMENT),
    Rule.direct(_class_loss, F.cross_entropy, F.nll_loss),
)
