"""Adam and its variants: the update rules of `torch.optim.Adam`, `AdamW`, `Adamax`, `NAdam` and `RAdam`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import (
    Hyperparameters,
    KernelRule,
    TensorLists,
    Tensors,
    UpdateRule,
    average_squares_,
    lerp_,
    with_weight_decay,
)

__all__ = ["Adam", "Adamax", "NAdam", "RAdam"]


@final
@dataclass(frozen=True)
class Adam(KernelRule):
    """m = β₁m + (1 - β₁)g;  v = β₂v + (1 - β₂)g²;  p = p - γ/(1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε).

    g = ±grad + λp (Kingma & Ba, arXiv:1412.6980); decoupled: g = ±grad and first p = (1 - γλ)p (Loshchilov & Hutter,
    arXiv:1711.05101); AMSGrad: the largest v so far replaces v (Reddi et al., arXiv:1904.09237).
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay", "differentiable"),
    )

    amsgrad: bool
    maximize: bool
    decoupled: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[Adam, Hyperparameters]":
        """Hyper-parameters: learning rate γ, β₁, β₂, ε, weight decay λ."""
        lr, (beta1, beta2), eps, decay, amsgrad, maximize, decoupled = settings
        numbers = (float(lr), float(beta1), float(beta2), float(eps), float(decay))
        return cls(bool(amsgrad), bool(maximize), bool(decoupled)), numbers

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments m and v, and the largest v."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """λ or 1 - γλ, 1 - β₁, β₂, 1 - β₂, ε."""
        lr, beta1, beta2, eps, decay = hyperparameters.unbind()
        return 1 - lr * decay if self.decoupled else decay, 1 - beta1, beta2, 1 - beta2, eps

    def step_coefficients(self, hyperparameters: Tensor, steps: Tensors, products: Tensors) -> Tensors:
        """γ/(1 - β₁ᵗ) and √(1 - β₂ᵗ)."""
        lr, beta1, beta2, _, _ = hyperparameters.unbind()
        t = torch.stack(steps)
        return lr / (1 - beta1**t), (1 - beta2**t).sqrt()

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        m, v, *largest = moments
        decay, weight1, beta2, weight2, eps, step_size, root = coefficients
        g = _gradient(grads, params, decay, self.maximize, self.decoupled)
        lerp_(m, g, weight1)
        average_squares_(v, g, beta2, weight2)
        if self.amsgrad:
            torch._foreach_maximum_(largest[0], v)
        denominator = torch._foreach_sqrt(largest[0] if self.amsgrad else v)
        torch._foreach_div_(denominator, root)
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(params, torch._foreach_mul(m, step_size), denominator, value=-1)

    def kernel(
        self, params: Tensors, grads: Tensors, moments: TensorLists, steps: Tensors, hyperparameters: tuple[Any, ...]
    ) -> None:
        """Call `torch._fused_adam_` or `torch._fused_adamw_`."""
        lr, beta1, beta2, eps, decay = hyperparameters
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            params,
            grads,
            moments[0],
            moments[1],
            moments[2] if self.amsgrad else [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
        )


@final
@dataclass(frozen=True)
class Adamax(UpdateRule):
    """m = β₁m + (1 - β₁)g;  u = max(β₂u, |g| + ε);  p = p - γ/(1 - β₁ᵗ) · m / u, where g = ±grad + λp.

    Kingma & Ba, arXiv:1412.6980, section 7.1.
    """

    settings: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay", "maximize", "differentiable")

    maximize: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[Adamax, Hyperparameters]":
        """Hyper-parameters: learning rate γ, β₁, β₂, ε, weight decay λ."""
        lr, (beta1, beta2), eps, decay, maximize = settings
        return cls(bool(maximize)), (float(lr), float(beta1), float(beta2), float(eps), float(decay))

    moments = ("exp_avg", "exp_inf")
    """The first moment m and the largest gradient u."""

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """λ, 1 - β₁, β₂, ε."""
        _, beta1, beta2, eps, decay = hyperparameters.unbind()
        return decay, 1 - beta1, beta2, eps

    def step_coefficients(self, hyperparameters: Tensor, steps: Tensors, products: Tensors) -> Tensors:
        """γ/(1 - β₁ᵗ)."""
        lr, beta1, *_ = hyperparameters.unbind()
        return (lr / (1 - beta1 ** torch.stack(steps)),)

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        m, u = moments
        decay, weight1, beta2, eps, step_size = coefficients
        g = with_weight_decay(grads, params, decay, self.maximize)
        lerp_(m, g, weight1)
        torch._foreach_mul_(u, beta2)
        size = torch._foreach_abs(g)
        torch._foreach_add_(size, eps)
        torch._foreach_maximum_(u, size)
        torch._foreach_addcdiv_(params, torch._foreach_mul(m, step_size), u, value=-1)


@final
@dataclass(frozen=True)
class NAdam(UpdateRule):
    """Adam with Nesterov momentum, whose coefficient μ follows a schedule.

    m = β₁m + (1 - β₁)g;  v = β₂v + (1 - β₂)g²;  μₜ = β₁(1 - ½ 0.96^(tψ));  Π = μ₁ ··· μₜ;
    p = p - γ ((1 - μₜ)/(1 - Π) · g + μₜ₊₁/(1 - Π μₜ₊₁) · m) / (√(v / (1 - β₂ᵗ)) + ε)

    g = ±grad + λp, or decoupled: g = ±grad and first p = (1 - γλ)p. Dozat, "Incorporating Nesterov Momentum into Adam",
    2016.
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "momentum_decay"),
        *("maximize", "decoupled_weight_decay", "differentiable"),
    )
    product: ClassVar[str | None] = "mu_product"

    maximize: bool
    decoupled: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[NAdam, Hyperparameters]":
        """Hyper-parameters: learning rate γ, β₁, β₂, ε, weight decay λ, momentum decay ψ."""
        lr, (beta1, beta2), eps, decay, momentum_decay, maximize, decoupled = settings
        numbers = (float(lr), float(beta1), float(beta2), float(eps), float(decay), float(momentum_decay))
        return cls(bool(maximize), bool(decoupled)), numbers

    moments = ("exp_avg", "exp_avg_sq")
    """The moments m and v."""

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """λ or 1 - γλ, 1 - β₁, β₂, 1 - β₂, ε."""
        lr, beta1, beta2, eps, decay, _ = hyperparameters.unbind()
        return 1 - lr * decay if self.decoupled else decay, 1 - beta1, beta2, 1 - beta2, eps

    def step_coefficients(self, hyperparameters: Tensor, steps: Tensors, products: Tensors) -> Tensors:
        """√(1 - β₂ᵗ), and the factors γ(1 - μₜ)/(1 - Π) of g and γμₜ₊₁/(1 - Π μₜ₊₁) of m."""
        lr, beta1, beta2, _, _, momentum_decay = hyperparameters.unbind()
        t = torch.stack(steps)
        mu = beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        following = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        torch._foreach_mul_(products, mu.to(products[0].dtype).unbind())
        product = torch.stack(products).to(mu)
        of_g, of_m = lr * (1 - mu) / (1 - product), lr * following / (1 - product * following)
        return (1 - beta2**t).sqrt(), of_g, of_m

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        m, v = moments
        decay, weight1, beta2, weight2, eps, root, of_g, of_m = coefficients
        g = _gradient(grads, params, decay, self.maximize, self.decoupled)
        lerp_(m, g, weight1)
        average_squares_(v, g, beta2, weight2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_div_(denominator, root)
        torch._foreach_add_(denominator, eps)
        numerator = torch._foreach_mul(g, of_g)
        torch._foreach_addcmul_(numerator, m, of_m)
        torch._foreach_addcdiv_(params, numerator, denominator, value=-1)


@final
@dataclass(frozen=True)
class RAdam(UpdateRule):
    """Adam without the second moment while the variance of that moment is too large.

    m = β₁m + (1 - β₁)g;  v = β₂v + (1 - β₂)g²;  ρ∞ = 2/(1 - β₂) - 1;  ρ = ρ∞ - 2t β₂ᵗ / (1 - β₂ᵗ);
    p = p - γ/(1 - β₁ᵗ) · r √(1 - β₂ᵗ) · m / (√v + ε), where r² = (ρ - 4)(ρ - 2)ρ∞ / ((ρ∞ - 4)(ρ∞ - 2)ρ), if ρ > 5,
    p = p - γ/(1 - β₁ᵗ) · m otherwise

    g = ±grad + λp, or decoupled: g = ±grad and first p = (1 - γλ)p. Liu et al., arXiv:1908.03265.
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay", "differentiable"),
    )

    maximize: bool
    decoupled: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[RAdam, Hyperparameters]":
        """Hyper-parameters: learning rate γ, β₁, β₂, ε, weight decay λ."""
        lr, (beta1, beta2), eps, decay, maximize, decoupled = settings
        numbers = (float(lr), float(beta1), float(beta2), float(eps), float(decay))
        return cls(bool(maximize), bool(decoupled)), numbers

    moments = ("exp_avg", "exp_avg_sq")
    """The moments m and v."""

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """λ or 1 - γλ, 1 - β₁, β₂, 1 - β₂."""
        lr, beta1, beta2, _, decay = hyperparameters.unbind()
        return 1 - lr * decay if self.decoupled else decay, 1 - beta1, beta2, 1 - beta2

    def step_coefficients(self, hyperparameters: Tensor, steps: Tensors, products: Tensors) -> Tensors:
        """The step size, then a limit and an offset: min(√v, limit) + offset is the denominator √v + ε, or 1."""
        lr, beta1, beta2, eps, _ = hyperparameters.unbind()
        t = torch.stack(steps)
        correction = 1 - beta2**t
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * t * beta2**t / correction
        rectified = length > 5
        square = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        step_size = lr / (1 - beta1**t) * torch.where(rectified, (square * correction).sqrt(), 1.0)
        return step_size, torch.where(rectified, torch.inf, 0.0), torch.where(rectified, eps, 1.0)

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        m, v = moments
        decay, weight1, beta2, weight2, step_size, limit, offset = coefficients
        g = _gradient(grads, params, decay, self.maximize, self.decoupled)
        lerp_(m, g, weight1)
        average_squares_(v, g, beta2, weight2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_minimum_(denominator, limit)
        torch._foreach_add_(denominator, offset)
        torch._foreach_addcdiv_(params, torch._foreach_mul(m, step_size), denominator, value=-1)


def _gradient(grads: Tensors, params: Tensors, decay: Tensors, maximize: bool, decoupled: bool) -> Tensors:
    """g = ±grad + λp; decoupled: g = ±grad, after p = (1 - γλ)p in place."""
    if not decoupled:
        return with_weight_decay(grads, params, decay, maximize)
    torch._foreach_mul_(params, decay)
    return torch._foreach_neg(grads) if maximize else grads
