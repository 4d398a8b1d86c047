"""Stochastic gradient descent, the rule of `torch.optim.SGD`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Numbers, Rule, narrow_, spread, widen

__all__ = ["SGD"]


@final
@dataclass(frozen=True)
class SGD(Rule):
    """g = ±grad + λp;  b = μb + (1 - τ)g, b = g the first time;  p = p - γb, or p - γ(g + μb) with Nesterov.

    Args:
        momentum: whether there is any (μ ≠ 0); without it no state is kept.
        nesterov: look ahead by the momentum.
        maximize: go up instead of down.
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "differentiable"),
    )
    counts: ClassVar[bool] = False

    momentum: bool
    nesterov: bool
    maximize: bool

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> "tuple[SGD, Numbers] | None":
        """Numbers: learning rate γ, momentum μ, dampening τ, weight decay λ."""
        *numbers, nesterov, maximize, differentiable = settings
        if differentiable:
            return None
        lr, momentum, dampening, decay = map(float, numbers)
        return cls(momentum != 0, bool(nesterov), bool(maximize)), (lr, momentum, dampening, decay)

    @property
    def moments(self) -> tuple[str, ...]:
        """The momentum buffer b."""
        return ("momentum_buffer",) if self.momentum else ()

    def has_kernel(self, numbers: Sequence[Numbers]) -> bool:
        """Not with dampening: it leaves out the first update, which the kernel can only tell for all parameters."""
        return all(dampening == 0 for _, _, dampening, _ in numbers)

    def kernel(
        self,
        params: list[Tensor],
        grads: tuple[Tensor, ...],
        moments: Sequence[list[Tensor]],
        steps: list[Tensor],
        numbers: Numbers,
    ) -> None:
        """The rule by `torch._fused_sgd_`; a buffer of zeros makes b = g the first time."""
        lr, momentum, dampening, decay = numbers
        torch._fused_sgd_(
            params,
            grads,
            moments[0] if moments else [],
            weight_decay=decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=False,
        )

    def elementwise(self, param: Tensor, grad: Tensor, state: Sequence[Tensor], numbers: Tensor) -> None:
        """The rule on stacked tensors."""
        p, g = widen(param), widen(grad)
        lr, momentum, dampening, decay = numbers.unbind()
        g = torch.addcmul(-g if self.maximize else g, spread(decay, p), p)
        if self.momentum:
            step, buffer = state
            b = widen(buffer)
            b.mul_(spread(momentum, p)).addcmul_(g, spread(1 - dampening * (step > 1), p))
            g = torch.addcmul(g, spread(momentum, p), b) if self.nesterov else b
            narrow_((buffer,), (b,))
        p.addcmul_(g, spread(lr, p), value=-1)
        narrow_((param,), (p,))
