"""Adamax, the rule of `torch.optim.Adamax`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Numbers, Tensors, UpdateRule, approach_, decayed

__all__ = ["Adamax"]


@final
@dataclass(frozen=True)
class Adamax(UpdateRule):
    """m = β₁m + (1 - β₁)g;  u = max(β₂u, |g| + ε);  p = p - γ/(1 - β₁ᵗ) · m / u, where g = ±grad + λp.

    Kingma & Ba, arXiv:1412.6980, section 7.1.

    Args:
        maximize: go up instead of down.
    """

    settings: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay", "maximize", "differentiable")

    maximize: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[Adamax, Numbers] | None":
        """Numbers: learning rate γ, β₁, β₂, ε, weight decay λ."""
        lr, (beta1, beta2), eps, decay, maximize, differentiable = settings
        if differentiable:
            return None
        return cls(bool(maximize)), (float(lr), float(beta1), float(beta2), float(eps), float(decay))

    @property
    def moments(self) -> tuple[str, ...]:
        """The first moment m and the largest gradient u."""
        return ("exp_avg", "exp_inf")

    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """λ, 1 - β₁, β₂, ε."""
        _, beta1, beta2, eps, decay = numbers.unbind()
        return decay, 1 - beta1, beta2, eps

    def schedule(self, numbers: Tensor, steps: Sequence[Tensor], products: Sequence[Tensor]) -> Sequence[Tensor]:
        """γ/(1 - β₁ᵗ)."""
        lr, beta1, *_ = numbers.unbind()
        return (lr / (1 - beta1 ** torch.stack(list(steps))),)

    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """The rule on stacked tensors."""
        m, u = moments
        decay, weight1, beta2, eps, step_size = numbers
        g = decayed(grads, params, decay, self.maximize)
        approach_(m, g, weight1)
        torch._foreach_mul_(u, beta2)
        size = torch._foreach_abs(g)
        torch._foreach_add_(size, eps)
        torch._foreach_maximum_(u, size)
        torch._foreach_addcdiv_(params, torch._foreach_mul(m, step_size), u, value=-1)
