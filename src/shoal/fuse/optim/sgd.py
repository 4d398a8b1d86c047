"""Stochastic gradient descent: the update rule of `torch.optim.SGD`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from shoal.fuse.optim.rule import Hyperparameters, KernelRule, TensorLists, Tensors, with_weight_decay

__all__ = ["SGD"]


@final
@dataclass(frozen=True)
class SGD(KernelRule):
    """g = ±grad + λp;  b = μb + (1 - τ)g, first b = g;  p = p - γb, or p - γ(g + μb) with Nesterov."""

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "differentiable"),
    )
    counts_updates: ClassVar[bool] = False

    momentum: bool
    nesterov: bool
    maximize: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[SGD, Hyperparameters]":
        """Hyper-parameters: learning rate γ, momentum μ, dampening τ, weight decay λ."""
        *numbers, nesterov, maximize = settings
        lr, momentum, dampening, decay = map(float, numbers)
        return cls(momentum != 0, bool(nesterov), bool(maximize)), (lr, momentum, dampening, decay)

    @property
    def moments(self) -> tuple[str, ...]:
        """The momentum buffer b."""
        return ("momentum_buffer",) if self.momentum else ()

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """γ, λ, μ."""
        lr, momentum, _, decay = hyperparameters.unbind()
        return lr, decay, momentum

    def step_coefficients(self, hyperparameters: Tensor, steps: Tensors, products: Tensors) -> Tensors:
        """1 - τ, or 1 at the first update."""
        if not self.momentum:
            return ()
        _, _, dampening, _ = hyperparameters.unbind()
        return (1 - dampening * (torch.stack(steps) > 1),)

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        lr, decay, momentum, *weight = coefficients
        g = with_weight_decay(grads, params, decay, self.maximize)
        if self.momentum:
            (buffer,) = moments
            torch._foreach_mul_(buffer, momentum)
            torch._foreach_addcmul_(buffer, g, weight[0])
            g = torch._foreach_addcmul(g, momentum, buffer) if self.nesterov else buffer
        torch._foreach_addcmul_(params, g, lr, value=-1)

    def has_kernel(self, hyperparameters: Sequence[Hyperparameters]) -> bool:
        """False with dampening, which skips the first update; the kernel has one such flag for all parameters."""
        return all(dampening == 0 for _, _, dampening, _ in hyperparameters)

    def kernel(
        self, params: Tensors, grads: Tensors, moments: TensorLists, steps: Tensors, hyperparameters: tuple[Any, ...]
    ) -> None:
        """Call `torch._fused_sgd_`; with a buffer of zeros, b = g at the first update."""
        lr, momentum, dampening, decay = hyperparameters
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
