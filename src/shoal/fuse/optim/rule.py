"""Base classes of optimizer update rules: a formula over lists of tensors, optionally with a fused torch kernel."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shoal.core.errors import FusionError

__all__ = [
    "Hyperparameters",
    "KernelRule",
    "TensorLists",
    "Tensors",
    "UpdateRule",
    "average_squares_",
    "kernel_takes",
    "lerp_",
    "unreadable_settings",
    "with_weight_decay",
]

Hyperparameters = tuple[float, ...]
"""The numeric settings of one member's parameter group, in the order that `UpdateRule.parse` returns."""

Tensors = list[Tensor] | tuple[Tensor, ...]
"""One tensor per parameter, as torch's multi-tensor functions `torch._foreach_*` take them."""

TensorLists = Sequence[Tensors]


class UpdateRule(ABC):
    """Update rule of an optimizer class.

    The fields of a rule are the settings that choose between formulas (`nesterov`, `amsgrad`). Groups with equal rules
    differ only in hyper-parameters and are updated together. At every step a `ParamGroupBatch` counts the update,
    computes the `step_coefficients` and calls `update`. It computes the `constants` again only after hyper-parameters
    have changed. `make_fx` can trace all these methods.
    """

    settings: ClassVar[tuple[str, ...]]
    """Keys read from a member's parameter group, the last one "differentiable"; `parse` takes their values."""

    counts_updates: ClassVar[bool] = True
    """Whether a member's state stores the number of updates under "step"."""

    product: ClassVar[str | None] = None
    """State key of a running product with one number per parameter, initially 1; None for rules without a product."""

    @classmethod
    def parse(cls, settings: Sequence[Any]) -> tuple[Self, Hyperparameters] | None:
        """The rule and hyper-parameters of a group, or None if it is differentiable: that needs the member's `step`."""
        return None if settings[-1] else cls._parse(settings[:-1])

    @classmethod
    @abstractmethod
    def _parse(cls, settings: Sequence[Any]) -> tuple[Self, Hyperparameters]: ...

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors with the parameter's shape. A rule without moments has no state at all."""

    def initial_moment(self, defaults: Mapping[str, Any]) -> float:
        """Initial value of the moments, for an optimizer with these defaults."""
        return 0.0

    @abstractmethod
    def constants(self, hyperparameters: Tensor) -> Tensors:
        """Inputs of `update`, [B] each, from K hyper-parameters [K, B] float64 alone."""

    def step_coefficients(self, hyperparameters: Tensor, steps: Tensors, products: Tensors) -> Tensors:
        """Inputs of `update`, [P, B] each, that depend on the number of updates so far, such as a bias correction.

        Args:
            steps: Number of updates of each of P parameters, including the current one, [B] each.
            products: `product` of each parameter, [B] each, updated in place; empty if the rule has none.
        """
        return ()

    @abstractmethod
    def update(self, params: Tensors, grads: Tensors, moments: TensorLists, coefficients: TensorLists) -> None:
        """Update parameters and moments in place.

        Args:
            params: Parameters, [B, *shape] each, real, float32 or wider.
            grads: Gradients, shaped as `params`; read only.
            coefficients: The `constants`, then the `step_coefficients`: for each a list like `params`, [B, 1, ...].
        """


class KernelRule(UpdateRule):
    """An update rule for which torch has a fused kernel."""

    on_cuda: ClassVar[bool] = True
    """Whether the kernel exists for CUDA in every supported version of torch, and not for the CPU alone."""

    def has_kernel(self, hyperparameters: Sequence[Hyperparameters]) -> bool:
        """Whether the kernel computes the same result as `update` for these hyper-parameters; by default True."""
        return True

    @abstractmethod
    def kernel(
        self, params: Tensors, grads: Tensors, moments: TensorLists, steps: Tensors, hyperparameters: tuple[Any, ...]
    ) -> None:
        """Update, in place, all parameters of one member, or of several with equal hyper-parameters and step counts.

        Args:
            steps: Number of updates of each parameter, including the current one, 0-dim; empty without moments.
            hyperparameters: As `parse` returns them, the learning rate first; it may be a tensor, float32 0-dim.
        """


def kernel_takes(param: Tensor) -> bool:
    """Whether torch's fused kernels can update a parameter of this dtype and device.

    On a CPU that of SGD leaves most of a parameter in half precision unchanged (torch 2.12 and 2.13).
    """
    return param.dtype in (torch.float64, torch.float32) or (
        param.dtype in (torch.bfloat16, torch.float16) and not param.is_cpu
    )


def lerp_(averages: Tensors, values: Tensors, weights: Tensors) -> None:
    """a = a + w(x - a), in place; compilers do not support `torch._foreach_lerp_` with one weight per tensor."""
    torch._foreach_addcmul_(averages, torch._foreach_sub(values, averages), weights)


def average_squares_(averages: Tensors, values: Tensors, decays: Tensors, weights: Tensors) -> None:
    """a = βa + wx², in place."""
    torch._foreach_mul_(averages, decays)
    torch._foreach_addcmul_(averages, torch._foreach_mul(values, weights), values)


def with_weight_decay(grads: Tensors, params: Tensors, decay: Tensors, maximize: bool) -> Tensors:
    """±grad + λp: the gradient with weight decay, with its sign reversed to ascend."""
    return torch._foreach_addcmul(torch._foreach_neg(grads) if maximize else grads, decay, params)


def unreadable_settings(b: int, number: int, group: Mapping[str, Any], reason: Exception) -> FusionError:
    """The error for a group of member b whose settings its rule cannot `parse`."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return FusionError(
        f"the optimizer of member {b} has settings in group {number} that cannot be read, {settings}: "
        f"{type(reason).__name__}: {reason}; correct them in its `param_groups`"
    )
