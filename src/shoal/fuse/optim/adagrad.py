"""The update rules of `torch.optim.Adagrad`, `Adadelta` and `RMSprop`."""

from collections.abc import Mapping, Sequence
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

__all__ = ["Adadelta", "Adagrad", "RMSprop"]


@final
@dataclass(frozen=True)
class Adagrad(KernelRule):
    """s = s + g²;  p = p - γ/(1 + (t - 1)η) · g / (√s + ε), where g = ±grad + λp.

    Duchi, Hazan & Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
    """

    settings: ClassVar[tuple[str, ...]] = ("lr", "lr_decay", "eps", "weight_decay", "maximize", "differentiable")
    on_cuda: ClassVar[bool] = False

    maximize: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[Adagrad, Hyperparameters]":
        """Hyper-parameters: learning rate γ, its decay η, ε, weight decay λ."""
        *numbers, maximize = settings
        lr, lr_decay, eps, decay = map(float, numbers)
        return cls(bool(maximize)), (lr, lr_decay, eps, decay)

    moments = ("sum",)
    """The sum of squares s."""

    def initial_moment(self, defaults: Mapping[str, Any]) -> float:
        """The initial `sum` of parameters that were added later; an optimizer's constructor initialises its own."""
        return float(defaults["initial_accumulator_value"])

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """λ, ε."""
        _, _, eps, decay = hyperparameters.unbind()
        return decay, eps

    def step_coefficients(self, hyperparameters: Tensor, steps: Tensors, products: Tensors) -> Tensors:
        """γ/(1 + (t - 1)η)."""
        lr, lr_decay, _, _ = hyperparameters.unbind()
        return (lr / (1 + (torch.stack(steps) - 1) * lr_decay),)

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        (squares,) = moments
        decay, eps, step_size = coefficients
        g = with_weight_decay(grads, params, decay, self.maximize)
        torch._foreach_addcmul_(squares, g, g)
        denominator = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(params, torch._foreach_mul(g, step_size), denominator, value=-1)

    def kernel(
        self, params: Tensors, grads: Tensors, moments: TensorLists, steps: Tensors, hyperparameters: tuple[Any, ...]
    ) -> None:
        """Call `torch._fused_adagrad_`."""
        lr, lr_decay, eps, decay = hyperparameters
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


@final
@dataclass(frozen=True)
class Adadelta(UpdateRule):
    """v = ρv + (1 - ρ)g²;  δ = √(u + ε) / √(v + ε) · g;  u = ρu + (1 - ρ)δ²;  p = p - γδ, where g = ±grad + λp.

    Zeiler, arXiv:1212.5701.
    """

    settings: ClassVar[tuple[str, ...]] = ("lr", "rho", "eps", "weight_decay", "maximize", "differentiable")

    maximize: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[Adadelta, Hyperparameters]":
        """Hyper-parameters: learning rate γ, ρ, ε, weight decay λ."""
        *numbers, maximize = settings
        lr, rho, eps, decay = map(float, numbers)
        return cls(bool(maximize)), (lr, rho, eps, decay)

    moments = ("square_avg", "acc_delta")
    """The running averages v and u."""

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """γ, ρ, 1 - ρ, ε, λ."""
        lr, rho, eps, decay = hyperparameters.unbind()
        return lr, rho, 1 - rho, eps, decay

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        squares, changes = moments
        lr, rho, weight, eps, decay = coefficients
        g = with_weight_decay(grads, params, decay, self.maximize)
        average_squares_(squares, g, rho, weight)
        root = torch._foreach_add(squares, eps)
        torch._foreach_sqrt_(root)
        delta = torch._foreach_add(changes, eps)
        torch._foreach_sqrt_(delta)
        torch._foreach_div_(delta, root)
        torch._foreach_mul_(delta, g)
        average_squares_(changes, delta, rho, weight)
        torch._foreach_addcmul_(params, delta, lr, value=-1)


@final
@dataclass(frozen=True)
class RMSprop(UpdateRule):
    """v = αv + (1 - α)g²;  b = μb + g / (√v + ε);  p = p - γb, where g = ±grad + λp.

    Hinton, lecture 6e of "Neural Networks for Machine Learning", 2012; centered: the variance v - a², with
    a = αa + (1 - α)g, replaces v (Graves, arXiv:1308.0850).
    """

    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize", "differentiable"),
    )

    momentum: bool
    centered: bool
    maximize: bool

    @classmethod
    def _parse(cls, settings: Sequence[Any]) -> "tuple[RMSprop, Hyperparameters]":
        """Hyper-parameters: learning rate γ, α, ε, weight decay λ, momentum μ."""
        *numbers, centered, maximize = settings
        lr, alpha, eps, decay, momentum = map(float, numbers)
        return cls(momentum > 0, bool(centered), bool(maximize)), (lr, alpha, eps, decay, momentum)

    @property
    def moments(self) -> tuple[str, ...]:
        """The running average v, the buffer b and the mean gradient a."""
        momentum = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *momentum, "grad_avg") if self.centered else ("square_avg", *momentum)

    def constants(self, hyperparameters: Tensor) -> Tensors:
        """γ, α, 1 - α, ε, λ, μ."""
        lr, alpha, eps, decay, momentum = hyperparameters.unbind()
        return lr, alpha, 1 - alpha, eps, decay, momentum

    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Apply the formula to stacked tensors."""
        squares, *others = moments
        lr, alpha, weight, eps, decay, momentum = coefficients
        g = with_weight_decay(grads, params, decay, self.maximize)
        average_squares_(squares, g, alpha, weight)
        spread = squares
        if self.centered:
            mean = others[-1]
            lerp_(mean, g, weight)
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
