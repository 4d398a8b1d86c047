"""RMSprop, the rule of `torch.optim.RMSprop`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Numbers, Tensors, UpdateRule, approach_, decayed

__all__ = ["RMSprop"]


@final
@dataclass(frozen=True)
class RMSprop(UpdateRule):
    """v = αv + (1 - α)g²;  b = μb + g / (√v + ε);  p = p - γb, where g = ±grad + λp.

    Hinton, lecture 6e of "Neural Networks for Machine Learning", 2012; centered: the variance v - a², with
    a = αa + (1 - α)g, in place of v (Graves, arXiv:1308.0850).

    Args:
        momentum: whether there is any (μ > 0); without it b is not kept.
        centered: divide by the variance instead of the mean square.
        maximize: go up instead of down.
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize", "differentiable"),
    )

    momentum: bool
    centered: bool
    maximize: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[RMSprop, Numbers] | None":
        """Numbers: learning rate γ, α, ε, weight decay λ, momentum μ."""
        *numbers, centered, maximize, differentiable = settings
        if differentiable:
            return None
        lr, alpha, eps, decay, momentum = map(float, numbers)
        return cls(momentum > 0, bool(centered), bool(maximize)), (lr, alpha, eps, decay, momentum)

    @property
    def moments(self) -> tuple[str, ...]:
        """The running average v, the buffer b and the mean gradient a."""
        momentum = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *momentum, "grad_avg") if self.centered else ("square_avg", *momentum)

    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """γ, α, 1 - α, ε, λ, μ."""
        lr, alpha, eps, decay, momentum = numbers.unbind()
        return lr, alpha, 1 - alpha, eps, decay, momentum

    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """The rule on stacked tensors."""
        squares, *others = moments
        lr, alpha, weight, eps, decay, momentum = numbers
        g = decayed(grads, params, decay, self.maximize)
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, torch._foreach_mul(g, weight), g)
        spread = squares
        if self.centered:
            mean = others[-1]
            approach_(mean, g, weight)
            spread = torch._foreach_addcmul(squares, mean, mean, value=-1)
        denominator = torch._foreach_sqrt(spread)
        torch._foreach_add_(denominator, eps)
        if self.momentum:
            buffer = others[0]
            torch._foreach_mul_(buffer, momentum)
            torch._foreach_addcdiv_(buffer, g, denominator)
            torch._foreach_addcmul_(params, buffer, lr, value=-1)
        else:
            torch._foreach_addcdiv_(params, torch._foreach_mul(g, lr), denominator, value=-1)
