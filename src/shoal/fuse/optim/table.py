"""The optimizer classes that have a fused rule."""

from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.fuse.optim.adam import Adam
from shoal.fuse.optim.rule import Rule
from shoal.fuse.optim.sgd import SGD

__all__ = ["RULES", "has_hooks", "rule_of"]

RULES: dict[type[Optimizer], type[Rule]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
}
"""By exact class: a subclass may do anything in its `step`."""


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule | None:
    """The rule for one of an optimizer's parameter groups, or None if the optimizer must step by itself."""
    kind = RULES.get(type(optimizer))
    parsed = kind.parse(itemgetter(*kind.settings)(group)) if kind is not None and not has_hooks(optimizer) else None
    return parsed[0] if parsed else None


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether anything wants to be called around the optimizer's own `step`."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
