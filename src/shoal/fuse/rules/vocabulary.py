"""Rules for losses over a large vocabulary, which keep no logits: members with a common head are rows of one pass."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.rules.base import Rule, functions_named, stacked_data
from shoal.fuse.rules.loss import mean_of_labelled, reduce_losses
from shoal.fuse.stacked import Stacked, member_count, member_values, stack
from shoal.fuse.token_log_probs import token_log_probs, token_statistics

__all__ = ["RULES"]


def _member_by_member(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function for each member, which holds the logits of one at a time; vmap would drop its gradients."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    members = member_count(leaves) or 1
    calls = [pytree.tree_unflatten(own, spec) for own in zip(*(member_values(x, members) for x in leaves), strict=True)]
    return stack([func(*own_args, **own_kwargs) for own_args, own_kwargs in calls])


def _token_log_probs(func: Any, hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    if any(isinstance(value, Stacked) for value in (weight, *options.values())):
        return _member_by_member(func, hidden, weight, labels, **options)
    members = member_count((hidden, labels)) or 1
    found = func(stacked_data(hidden, members), weight, stacked_data(labels, members), **options)
    return pytree.tree_map_only(Tensor, Stacked, found)


def _linear_cross_entropy(
    func: Any,
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: Any = 0.0,
    options: Any = None,
) -> Any:
    given = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction, "ignore_index": ignore_index}
    labelled = not target.is_floating_point() and target.shape == input.shape[:-1] and linear_weight.dim() == 2
    smoothed = isinstance(label_smoothing, Stacked) or label_smoothing
    if not labelled or smoothed or weight is not None or input.dim() > 2 or reduction not in ("none", "mean", "sum"):
        return _member_by_member(
            func, input, linear_weight, target, **given, label_smoothing=label_smoothing, options=options
        )
    ignored = -100 if ignore_index is None else ignore_index
    found = _token_log_probs(token_log_probs, input, linear_weight, target, bias=linear_bias, ignore_index=ignored)
    losses = -found.whole
    if reduction == "mean":
        labels = stacked_data(target, len(losses))
        losses = mean_of_labelled(losses.view(len(losses), -1), labels.reshape(len(losses), -1), None, ignored)
    else:
        losses = reduce_losses(losses, reduction)
    return Stacked(losses.to(input.dtype))


RULES = (
    Rule.direct(_token_log_probs, token_log_probs, token_statistics),
    *(Rule.direct(_linear_cross_entropy, func) for func in functions_named("linear_cross_entropy", F)),  # torch 2.13
)
