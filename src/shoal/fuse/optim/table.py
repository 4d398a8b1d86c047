"""The optimizer classes that have a fused rule."""

from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.fuse.optim.adadelta import Adadelta
from shoal.fuse.optim.adagrad import Adagrad
from shoal.fuse.optim.adam import Adam
from shoal.fuse.optim.adamax import Adamax
from shoal.fuse.optim.nadam import NAdam
from shoal.fuse.optim.radam import RAdam
from shoal.fuse.optim.rmsprop import RMSprop
from shoal.fuse.optim.rule import Rule
from shoal.fuse.optim.sgd import SGD

__all__ = ["RULES", "has_global_hooks", "has_hooks", "rule_of"]

RULES: dict[type[Optimizer], type[Rule]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: Adam,
    torch.optim.Adamax: Adamax,
    torch.optim.NAdam: NAdam,
    torch.optim.RAdam: RAdam,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adadelta: Adadelta,
    torch.optim.RMSprop: RMSprop,
}
"""By exact class: a subclass may do anything in its `step`."""


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule | None:
    """The rule for one of an optimizer's parameter groups, or None if the optimizer must step by itself."""
    kind = RULES.get(type(optimizer))
    if kind is None or has_hooks(optimizer) or has_global_hooks():
        return None
    parsed = kind.parse(itemgetter(*kind.settings)(group))
    return parsed[0] if parsed else None


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether anything wants to be called around the optimizer's own `step`."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_global_hooks() -> bool:
    """The same around the `step` of every optimizer."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
