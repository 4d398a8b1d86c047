"""Adam and AdamW, the rule of `torch.optim.Adam` and `torch.optim.AdamW`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Numbers, Rule, narrow_, spread, widen

__all__ = ["Adam"]


@final
@dataclass(frozen=True)
class Adam(Rule):
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
    counts: ClassVar[bool] = True

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

    def has_kernel(self, numbers: Sequence[Numbers]) -> bool:
        """Always."""
        return True

    def kernel(
        self,
        params: list[Tensor],
        grads: tuple[Tensor, ...],
        moments: Sequence[list[Tensor]],
        steps: list[Tensor],
        numbers: Numbers,
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

    def elementwise(self, param: Tensor, grad: Tensor, state: Sequence[Tensor], numbers: Tensor) -> None:
        """The rule on stacked tensors."""
        step, *moments = state
        p, g = widen(param), widen(grad)
        m, v, *largest = map(widen, moments)
        lr, beta1, beta2, eps, decay = numbers.unbind()
        g = -g if self.maximize else g
        if self.decoupled:
            p.mul_(spread(1 - lr * decay, p))
        else:
            g = torch.addcmul(g, spread(decay, p), p)
        m.lerp_(g, spread(1 - beta1, p))
        v.mul_(spread(beta2, p)).addcmul_(g * spread(1 - beta2, p), g)
        top = largest[0].copy_(torch.maximum(largest[0], v)) if self.amsgrad else v
        step_size = lr / (1 - beta1**step)
        root = (1 - beta2**step).sqrt()
        denominator = top.sqrt().div_(spread(root, p)).add_(spread(eps, p))
        p.addcdiv_(m * spread(step_size, p), denominator, value=-1)
        narrow_((param, *moments), (p, m, v, *largest))
