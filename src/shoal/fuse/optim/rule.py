"""The contract of an update rule: one formula, written for two ways of running it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

__all__ = ["Numbers", "Rule", "narrow_", "spread", "widen"]

Numbers = tuple[float, ...]
"""The numeric settings of one member's parameter group, in an order that its rule knows."""


class Rule(ABC):
    """How an optimizer class updates a parameter.

    The fields of a rule are the settings that choose between formulas (`nesterov`, `amsgrad`); groups of equal rules
    differ in numbers alone and are updated together. A cohort of members first counts the update in `step`, then calls
    `kernel` once for each member, or `elementwise` once for each parameter. Both work in place.
    """

    settings: ClassVar[tuple[str, ...]]
    """What is read of a member's parameter group; handed to `parse` in this order."""

    counts: ClassVar[bool]
    """Whether a member's own state has the number of updates, under "step"."""

    @classmethod
    @abstractmethod
    def parse(cls, settings: Sequence[Any]) -> tuple[Self, Numbers] | None:
        """A group's rule and numbers, or None if only the member's own optimizer can do what it asks for."""

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors, which have the parameter's shape and begin at zero. Without any, none is kept."""

    @abstractmethod
    def has_kernel(self, numbers: Sequence[Numbers]) -> bool:
        """Whether torch's fused kernel does the same for members with these numbers."""

    @abstractmethod
    def kernel(
        self,
        params: list[Tensor],
        grads: tuple[Tensor, ...],
        moments: Sequence[list[Tensor]],
        steps: list[Tensor],
        numbers: Numbers,
    ) -> None:
        """Update all parameters of one member by torch's fused kernel.

        Args:
            params: the member's parameters, dense.
            grads: as `params`.
            moments: for each name in `moments` a list as `params`.
            steps: number of updates of each parameter, this one included, 0-dim; empty without moments.
            numbers: the member's.
        """

    @abstractmethod
    def elementwise(self, param: Tensor, grad: Tensor, state: Sequence[Tensor], numbers: Tensor) -> None:
        """Update one parameter of all members by functions that `make_fx` can trace.

        Args:
            param: [B, *shape], real.
            grad: as `param`.
            state: the number of updates of each member, this one included, [B], then the moments, as `param`; empty
                without moments.
            numbers: [K, B] float64: the K numbers of every member.
        """


def widen(tensor: Tensor) -> Tensor:
    """The tensor itself, or for half-precision types a float32 copy, the precision that updates are computed in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def narrow_(tensors: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    """Write what was computed in `widen`ed copies back to the tensors."""
    for tensor, copy in zip(tensors, wide, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def spread(number: Tensor, like: Tensor) -> Tensor:
    """A number of each member, [B], in the dtype of `like`, [B, *shape], and to be broadcast against it."""
    return number.to(like.dtype).view(-1, *[1] * (like.dim() - 1))
