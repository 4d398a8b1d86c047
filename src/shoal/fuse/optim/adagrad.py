"""Adagrad, the rule of `torch.optim.Adagrad`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import KernelRule, Numbers, Tensors, decayed

__all__ = ["Adagrad"]


@final
@dataclass(frozen=True)
class Adagrad(KernelRule):
    """s = s + g²;  p = p - γ/(1 + (t - 1)η) · g / (√s + ε), where g = ±grad + λp.

    Duchi, Hazan & Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.

    Args:
        maximize: go up instead of down.
    """

    settings: ClassVar[tuple[str, ...]] = ("lr", "lr_decay", "eps", "weight_decay", "maximize", "differentiable")

    maximize: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[Adagrad, Numbers] | None":
        """Numbers: learning rate γ, its decay η, ε, weight decay λ."""
        *numbers, maximize, differentiable = settings
        if differentiable:
            return None
        lr, lr_decay, eps, decay = map(float, numbers)
        return cls(bool(maximize)), (lr, lr_decay, eps, decay)

    @property
    def moments(self) -> tuple[str, ...]:
        """The sum of squares s."""
        return ("sum",)

    def begin(self, defaults: Mapping[str, Any]) -> float:
        """An optimizer fills in `sum` when it is made; this is for parameters that are added to it later."""
        return float(defaults["initial_accumulator_value"])

    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """λ, ε."""
        _, _, eps, decay = numbers.unbind()
        return decay, eps

    def schedule(self, numbers: Tensor, steps: Sequence[Tensor], products: Sequence[Tensor]) -> Sequence[Tensor]:
        """γ/(1 + (t - 1)η)."""
        lr, lr_decay, _, _ = numbers.unbind()
        return (lr / (1 + (torch.stack(list(steps)) - 1) * lr_decay),)

    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """The rule on stacked tensors."""
        (squares,) = moments
        decay, eps, step_size = numbers
        g = decayed(grads, params, decay, self.maximize)
        torch._foreach_addcmul_(squares, g, g)
        denominator = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(params, torch._foreach_mul(g, step_size), denominator, value=-1)

    def has_kernel(self, numbers: Sequence[Numbers]) -> bool:
        """Always."""
        return True

    def kernel(
        self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], steps: Tensors, numbers: Numbers
    ) -> None:
        """The rule by `torch._fused_adagrad_`."""
        lr, lr_decay, eps, decay = numbers
        torch._fused_adagrad_(
            params,
            grads,
            moments[0],
            steps,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=decay,
            eps=eps,
            maximize=self.maximize,
        )
