"""Adadelta, the rule of `torch.optim.Adadelta`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Numbers, Tensors, UpdateRule, decayed

__all__ = ["Adadelta"]


@final
@dataclass(frozen=True)
class Adadelta(UpdateRule):
    """v = ρv + (1 - ρ)g²;  δ = √(u + ε) / √(v + ε) · g;  u = ρu + (1 - ρ)δ²;  p = p - γδ, where g = ±grad + λp.

    Zeiler, arXiv:1212.5701.

    Args:
        maximize: go up instead of down.
    """

    settings: ClassVar[tuple[str, ...]] = ("lr", "rho", "eps", "weight_decay", "maximize", "differentiable")

    maximize: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[Adadelta, Numbers] | None":
        """Numbers: learning rate γ, ρ, ε, weight decay λ."""
        *numbers, maximize, differentiable = settings
        if differentiable:
            return None
        lr, rho, eps, decay = map(float, numbers)
        return cls(bool(maximize)), (lr, rho, eps, decay)

    @property
    def moments(self) -> tuple[str, ...]:
        """The running averages v and u."""
        return ("square_avg", "acc_delta")

    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """γ, ρ, 1 - ρ, ε, λ."""
        lr, rho, eps, decay = numbers.unbind()
        return lr, rho, 1 - rho, eps, decay

    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """The rule on stacked tensors."""
        squares, changes = moments
        lr, rho, weight, eps, decay = numbers
        g = decayed(grads, params, decay, self.maximize)
        torch._foreach_mul_(squares, rho)
        torch._foreach_addcmul_(squares, torch._foreach_mul(g, weight), g)
        root = torch._foreach_add(squares, eps)
        torch._foreach_sqrt_(root)
        delta = torch._foreach_add(changes, eps)
        torch._foreach_sqrt_(delta)
        torch._foreach_div_(delta, root)
        torch._foreach_mul_(delta, g)
        torch._foreach_mul_(changes, rho)
        torch._foreach_addcmul_(changes, torch._foreach_mul(delta, weight), delta)
        torch._foreach_addcmul_(params, delta, lr, value=-1)
