"""The optimizer classes that have a fused rule."""

from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.fuse.optim.adagrad import Adadelta, Adagrad, RMSprop
from shoal.fuse.optim.adam import Adam, Adamax, NAdam, RAdam
from shoal.fuse.optim.rule import KernelRule, UpdateRule
from shoal.fuse.optim.sgd import SGD

__all__ = ["RULES", "kernel_group_of", "rule_of", "steps_as_made"]

RULES: dict[type[Optimizer], type[UpdateRule]] = {
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


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> UpdateRule | None:
    """The rule for one of an optimizer's parameter groups, or None if the optimizer must step by itself."""
    kind = RULES.get(type(optimizer))
    if kind is None or not steps_as_made(optimizer):
        return None
    parsed = kind.parse(itemgetter(*kind.settings)(group))
    return parsed[0] if parsed else None


def kernel_group_of(optimizer: Optimizer) -> str:
    """Whom an optimizer may be in one array with at no loss of speed: all that follow a rule torch has a kernel for; of
    others those of its class.
    """
    kind = type(optimizer)
    if all(isinstance(rule_of(optimizer, group), KernelRule) for group in optimizer.param_groups):
        return "kernels"
    return f"{kind.__module__}.{kind.__qualname__}"


def steps_as_made(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `step` is that of its class: with no hooks, those of all optimizers included, and nothing
    in its place but what a scheduler puts there to see that it is called.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    own = vars(optimizer).get("step")
    return own is None or (hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is type(optimizer).step)
