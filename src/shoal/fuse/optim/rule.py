"""The contract of an update rule: one formula over lists of tensors, and perhaps a kernel of torch's for it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shoal.core.errors import FusionError

__all__ = ["KernelRule", "Numbers", "Tensors", "UpdateRule", "approach_", "decayed", "unreadable"]

Numbers = tuple[float, ...]
"""The numeric settings of one member's parameter group, in an order that its rule knows."""

Tensors = list[Tensor] | tuple[Tensor, ...]
"""One tensor for each parameter; what torch's multi-tensor functions, `torch._foreach_*`, take."""


class UpdateRule(ABC):
    """How an optimizer class updates parameters.

    The fields of a rule are the settings that choose between formulas (`nesterov`, `amsgrad`); groups of equal rules
    differ in numbers alone and are updated together. At every step a batch of groups of members counts the update, asks
    for the `schedule` and calls `update`; it asks for the `constants` only when the members' numbers have changed. All
    of it can be traced by `make_fx`.
    """

    settings: ClassVar[tuple[str, ...]]
    """What is read of a member's parameter group; handed to `parse` in this order."""

    counts: ClassVar[bool] = True
    """Whether a member's own state has the number of updates, under "step"."""

    product: ClassVar[str | None] = None
    """Name of one more number that is kept for each parameter, if any; it begins at one."""

    @classmethod
    @abstractmethod
    def parse(cls, settings: Sequence[Any]) -> tuple[Self, Numbers] | None:
        """A group's rule and numbers, or None if only the member's own optimizer can do what it asks for."""

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors that have the parameter's shape. Without any, no state is kept at all."""

    def begin(self, defaults: Mapping[str, Any]) -> float:
        """What the moments of an optimizer with these defaults are filled with at first."""
        return 0.0

    @abstractmethod
    def constants(self, numbers: Tensor) -> Sequence[Tensor]:
        """What `update` needs of the members' numbers.

        Args:
            numbers: [K, B] float64: the K numbers of every member.

        Returns:
            Some numbers of every member, [B] each.
        """

    def schedule(self, numbers: Tensor, steps: Sequence[Tensor], products: Sequence[Tensor]) -> Sequence[Tensor]:
        """What `update` needs that depends on the number of updates so far, such as a correction of bias.

        Args:
            numbers: [K, B] float64.
            steps: number of updates of each of P parameters, this one included, [B] each.
            products: of each parameter, [B] each, to be brought up to date in place; empty if the rule has none.

        Returns:
            Some numbers of every parameter and member, [P, B] each.
        """
        return ()

    @abstractmethod
    def update(self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]) -> None:
        """Update parameters and moments in place.

        Args:
            params: [B, *shape] each, real, float32 or wider.
            grads: as `params`; not to be changed.
            moments: for each name in `moments` a list as `params`.
            numbers: the `constants`, then the `schedule`; for each a list as `params`, [B, 1, ...].
        """


class KernelRule(UpdateRule):
    """A rule that torch has a fused kernel for."""

    @abstractmethod
    def has_kernel(self, numbers: Sequence[Numbers]) -> bool:
        """Whether the kernel does the same for members with these numbers."""

    @abstractmethod
    def kernel(
        self, params: Tensors, grads: Tensors, moments: Sequence[Tensors], steps: Tensors, numbers: Numbers
    ) -> None:
        """Update, in place, all parameters of a member, or of several members that agree in numbers and steps.

        Args:
            params: dense.
            grads: as `params`, and as dense.
            moments: for each name in `moments` a list as `params`.
            steps: number of updates of each parameter, this one included, 0-dim; empty without moments.
            numbers: theirs.
        """


def approach_(averages: Tensors, values: Tensors, weights: Tensors) -> None:
    """A = a + w(x - a), in place; `torch.lerp`, which compilers do not know for lists with weights of their own."""
    torch._foreach_addcmul_(averages, torch._foreach_sub(values, averages), weights)


def decayed(grads: Tensors, params: Tensors, decay: Tensors, maximize: bool) -> Tensors:
    """±g + λp: the gradient to go down, or up, with weight decay as a part of it."""
    return torch._foreach_addcmul(torch._foreach_neg(grads) if maximize else grads, decay, params)


def unreadable(b: int, number: int, group: Mapping[str, Any], reason: Exception) -> FusionError:
    """The error of a member whose group has settings that its rule cannot `parse`."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return FusionError(
        f"the optimizer of member {b} has settings in group {number} that cannot be read, {settings}: "
        f"{type(reason).__name__}: {reason}; put them right in its `param_groups`"
    )
