"""Losses of pairs of elements: computed for all members at once, then reduced within each member."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.base import Rule
from shoal.fuse.rules.elementwise import align
from shoal.fuse.stacked import Stacked, count

__all__ = ["RULES", "reduced"]


def reduced(values: Tensor, reduction: str) -> Tensor:
    """Losses [B, ...] as each member's one, [B]; or as they are, if `reduction` is "none"."""
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
    members = count((input, target, weights)) or 1
    aligned = align((input, target, *weights.values()))
    if aligned is None:
        return NotImplemented
    x, y, *scales = aligned
    x, y = (value.expand(members, *input.shape) for value in (x, y))
    values = func(x, y, reduction="none", **dict(zip(weights, scales, strict=True)), **numbers)
    if reduction == "batchmean" and func is F.kl_div:
        return Stacked(reduced(values, "sum") / (len(input) if input.dim() else 1))
    return Stacked(reduced(values, reduction))


_WEIGHTED = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
"""Those that multiply by weights before the mean is taken."""

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
RULES = (Rule.direct(_per_element, *_PER_ELEMENT),)
