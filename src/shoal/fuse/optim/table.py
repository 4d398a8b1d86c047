"""Registry of the optimizer classes with a fused update rule."""

from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.fuse.optim.adagrad import Adadelta, Adagrad, RMSprop
from shoal.fuse.optim.adam import Adam, Adamax, NAdam, RAdam
from shoal.fuse.optim.rule import KernelRule, UpdateRule
from shoal.fuse.optim.sgd import SGD

__all__ = ["RULES", "has_unmodified_step", "rule_of", "update_kind_of"]

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
"""Exact optimizer class -> rule. A subclass has no rule, since its `step` may compute something else."""


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> UpdateRule | None:
    """The rule of one parameter group of an optimizer, or None if the optimizer must use its own `step`."""
    kind = RULES.get(type(optimizer))
    if kind is None or not has_unmodified_step(optimizer):
        return None
    parsed = kind.parse(itemgetter(*kind.settings)(group))
    return parsed[0] if parsed else None


def update_kind_of(optimizer: Optimizer) -> str:
    """Key that is equal for optimizers that can share an array without loss of speed: with kernels, or of one class."""
    kind = type(optimizer)
    if all(isinstance(rule_of(optimizer, group), KernelRule) for group in optimizer.param_groups):
        return "kernels"
    return f"{kind.__module__}.{kind.__qualname__}"


def has_unmodified_step(optimizer: Optimizer) -> bool:
    """Whether `step` is its class's, without hooks; the wrapper by which LR schedulers count calls is allowed."""
    try:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    except AttributeError:  # a wrapper that does not call `Optimizer.__init__`
        return False
    if hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    own = vars(optimizer).get("step")
    return own is None or (hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is type(optimizer).step)
