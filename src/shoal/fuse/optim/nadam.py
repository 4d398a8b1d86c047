"""NAdam, the rule of `torch.optim.NAdam`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Numbers, Tensors, UpdateRule, approach_, decayed

__all__ = ["NAdam"]


@final
@dataclass(frozen=True)
class NAdam(UpdateRule):
    """Adam whose momentum, after a schedule of its own, looks ahead as Nesterov's does.

    m = β₁m + (1 - β₁)g;  v = β₂v + (1 - β₂)g²;  μₜ = β₁(1 - ½ 0.96^(tψ));  Π = μ₁ ··· μₜ;
    p = p - γ ((1 - μₜ)/(1 - Π) · g + μₜ₊₁/(1 - Π μₜ₊₁) · m) / (√(v / (1 - β₂ᵗ)) + ε)

    g = ±grad + λp, or decoupled: g = ±grad and first p = (1 - γλ)p. Dozat, "Incorporating Nesterov Momentum into Adam",
    2016.

    Args:
        maximize: go up instead of down.
        decoupled: decay the weights apart from the gradient.
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "momentum_decay"),
        *("maximize", "decoupled_weight_decay", "differentiable"),
    )
    product: ClassVar[str | None] = "mu_product"

    maximize: bool
    decoupled: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[NAdam, Numbers] | None":
        """Numbers: learning rate γ, β₁, β₂, ε, weight decay λ, momentum decay ψ."""
        lr, (beta1, beta2), eps, decay, momentum_decay, maximize, decoupled, differentiable = settings
        if differentiable:
            return None
        numbers = (float(lr), float(beta1), float(beta2), float(eps), float(decay), float(momentum_decay))
        return cls(bool(maximize), bool(decoupled)), numbers

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments m and v."""
        return ("exp_avg", "exp_avg_sq")

    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """λ or 1 - γλ, 1 - β₁, β₂, 1 - β₂, ε."""
        lr, beta1, beta2, eps, decay, _ = numbers.unbind()
        return 1 - lr * decay if self.decoupled else decay, 1 - beta1, beta2, 1 - beta2, eps

    def schedule(self, numbers: Tensor, steps: Sequence[Tensor], products: Sequence[Tensor]) -> Sequence[Tensor]:
        """√(1 - β₂ᵗ), and the factors γ(1 - μₜ)/(1 - Π) of g and γμₜ₊₁/(1 - Π μₜ₊₁) of m."""
        lr, beta1, beta2, _, _, momentum_decay = numbers.unbind()
        t = torch.stack(list(steps))
        mu = beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        following = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        torch._foreach_mul_(list(products), mu.to(products[0].dtype).unbind())
        product = torch.stack(list(products)).to(mu)
        of_g, of_m = lr * (1 - mu) / (1 - product), lr * following / (1 - product * following)
        return (1 - beta2**t).sqrt(), of_g, of_m

    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """The rule on stacked tensors."""
        m, v = moments
        decay, weight1, beta2, weight2, eps, root, of_g, of_m = numbers
        if self.decoupled:
            torch._foreach_mul_(params, decay)
            g = torch._foreach_neg(grads) if self.maximize else grads
        else:
            g = decayed(grads, params, decay, self.maximize)
        approach_(m, g, weight1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, torch._foreach_mul(g, weight2), g)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_div_(denominator, root)
        torch._foreach_add_(denominator, eps)
        numerator = torch._foreach_mul(g, of_g)
        torch._foreach_addcmul_(numerator, m, of_m)
        torch._foreach_addcdiv_(params, numerator, denominator, value=-1)
