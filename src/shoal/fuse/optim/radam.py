"""RAdam, the rule of `torch.optim.RAdam`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Numbers, Tensors, UpdateRule, approach_, decayed

__all__ = ["RAdam"]


@final
@dataclass(frozen=True)
class RAdam(UpdateRule):
    """Adam that goes without its second moment as long as that has too large a variance.

    m = β₁m + (1 - β₁)g;  v = β₂v + (1 - β₂)g²;  ρ∞ = 2/(1 - β₂) - 1;  ρ = ρ∞ - 2t β₂ᵗ / (1 - β₂ᵗ);
    p = p - γ/(1 - β₁ᵗ) · r √(1 - β₂ᵗ) · m / (√v + ε), where r² = (ρ - 4)(ρ - 2)ρ∞ / ((ρ∞ - 4)(ρ∞ - 2)ρ), if ρ > 5,
    p = p - γ/(1 - β₁ᵗ) · m otherwise

    g = ±grad + λp, or decoupled: g = ±grad and first p = (1 - γλ)p. Liu et al., arXiv:1908.03265.

    Args:
        maximize: go up instead of down.
        decoupled: decay the weights apart from the gradient.
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay", "differentiable"),
    )

    maximize: bool
    decoupled: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[RAdam, Numbers] | None":
        """Numbers: learning rate γ, β₁, β₂, ε, weight decay λ."""
        lr, (beta1, beta2), eps, decay, maximize, decoupled, differentiable = settings
        if differentiable:
            return None
        numbers = (float(lr), float(beta1), float(beta2), float(eps), float(decay))
        return cls(bool(maximize), bool(decoupled)), numbers

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments m and v."""
        return ("exp_avg", "exp_avg_sq")

    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """λ or 1 - γλ, 1 - β₁, β₂, 1 - β₂."""
        lr, beta1, beta2, _, decay = numbers.unbind()
        return 1 - lr * decay if self.decoupled else decay, 1 - beta1, beta2, 1 - beta2

    def schedule(self, numbers: Tensor, steps: Sequence[Tensor], products: Sequence[Tensor]) -> Sequence[Tensor]:
        """The size of a step, and what makes the denominator √v + ε, or 1, of √v: an upper limit and a summand."""
        lr, beta1, beta2, eps, _ = numbers.unbind()
        t = torch.stack(list(steps))
        left = 1 - beta2**t
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * t * beta2**t / left
        rectified = length > 5
        square = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        step_size = lr / (1 - beta1**t) * torch.where(rectified, (square * left).sqrt(), 1.0)
        return step_size, torch.where(rectified, torch.inf, 0.0), torch.where(rectified, eps, 1.0)

    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """The rule on stacked tensors."""
        m, v = moments
        decay, weight1, beta2, weight2, step_size, limit, offset = numbers
        if self.decoupled:
            torch._foreach_mul_(params, decay)
            g = torch._foreach_neg(grads) if self.maximize else grads
        else:
            g = decayed(grads, params, decay, self.maximize)
        approach_(m, g, weight1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, torch._foreach_mul(g, weight2), g)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_minimum_(denominator, limit)
        torch._foreach_add_(denominator, offset)
        torch._foreach_addcdiv_(params, torch._foreach_mul(m, step_size), denominator, value=-1)
