"""Adam and AdamW, the rule of `torch.optim.Adam` and `torch.optim.AdamW`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import KernelRule, Numbers, Tensors, approach_, decayed

__all__ = ["Adam"]


@final
@dataclass(frozen=True)
class Adam(KernelRule):
    """m = β₁m + (1 - β₁)g;  v = β₂v + (1 - β₂)g²;  p = p - γ/(1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε).

    g = ±grad + λp (Kingma & Ba, arXiv:1412.6980); decoupled: g = ±grad and first p = (1 - γλ)p (Loshchilov & Hutter,
    arXiv:1711.05101); AMSGrad: the largest v so far in place of v (Reddi et al., arXiv:1904.09237).

    Args:
        amsgrad: divide by the largest second moment so far.
        maximize: go up instead of down.
        decoupled: decay the weights apart from the gradient, as AdamW does.
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay", "differentiable"),
    )

    amsgrad: bool
    maximize: bool
    decoupled: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[Adam, Numbers] | None":
        """Numbers: learning rate γ, β₁, β₂, ε, weight decay λ."""
        lr, (beta1, beta2), eps, decay, amsgrad, maximize, decoupled, differentiable = settings
        if differentiable:
            return None
        numbers = (float(lr), float(beta1), float(beta2), float(eps), float(decay))
        return cls(bool(amsgrad), bool(maximize), bool(decoupled)), numbers

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments m and v, and the largest v."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """λ or 1 - γλ, 1 - β₁, β₂, 1 - β₂, ε."""
        lr, beta1, beta2, eps, decay = numbers.unbind()
        return 1 - lr * decay if self.decoupled else decay, 1 - beta1, beta2, 1 - beta2, eps

    def schedule(self, numbers: Tensor, steps: Sequence[Tensor], products: Sequence[Tensor]) -> Sequence[Tensor]:
        """γ/(1 - β₁ᵗ) and √(1 - β₂ᵗ)."""
        lr, beta1, beta2, _, _ = numbers.unbind()
        t = torch.stack(list(steps))
        return lr / (1 - beta1**t), (1 - beta2**t).sqrt()

    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """The rule on stacked tensors."""
        m, v, *largest = moments
        decay, weight1, beta2, weight2, eps, step_size, root = numbers
        if self.decoupled:
            torch._foreach_mul_(params, decay)
            g = torch._foreach_neg(grads) if self.maximize else grads
        else:
            g = decayed(grads, params, decay, self.maximize)
        approach_(m, g, weight1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, torch._foreach_mul(g, weight2), g)
        if self.amsgrad:
            torch._foreach_maximum_(largest[0], v)
        denominator = torch._foreach_sqrt(largest[0] if self.amsgrad else v)
        torch._foreach_div_(denominator, root)
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(params, torch._foreach_mul(m, step_size), denominator, value=-1)

    def has_kernel(self, numbers: Sequence[Numbers]) -> bool:
        """Always."""
        return True

    def kernel(
        self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], steps: Tensors, numbers: Numbers
    ) -> None:
        """The rule by `torch._fused_adam_` or `torch._fused_adamw_`."""
        lr, beta1, beta2, eps, decay = numbers
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
