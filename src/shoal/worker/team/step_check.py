"""Compares the gradients that a team has computed with those of the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.fuse.shard import IndivisibleStepError

__all__ = ["GradientSnapshot", "tolerance"]

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_MIXED_TOLERANCE = 3e-2


def tolerance(dtype: torch.dtype, mixed: bool) -> float:
    """Largest relative difference of two sums over the same rows in different order.

    Args:
        dtype: Type of the gradients.
        mixed: Whether the model runs under autocast, in a type of half precision.
    """
    return _MIXED_TOLERANCE if mixed else _TOLERANCES.get(dtype, _MIXED_TOLERANCE)


@dataclass(frozen=True)
class GradientSnapshot:
    """Losses, gradients and buffers of a step that one process has computed alone.

    Args:
        losses: Losses, [B].
        gradients: Gradients, [B, *shape] each, or None.
        buffers: Buffers after the step, [B, *shape] each.
    """

    losses: Tensor
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]

    @classmethod
    def of(cls, losses: Tensor, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> "GradientSnapshot":
        """Copy the losses and gradients; `buffers` are copies."""
        return cls(losses.clone(), [None if p.grad is None else p.grad.clone() for p in parameters], buffers)

    def check(self, other: "GradientSnapshot", relative: float) -> None:
        """Compare with what a team has computed.

        Args:
            other: Snapshot of the same step of the team.
            relative: Largest difference of a member's values, relative to the norm of these values.

        Raises:
            IndivisibleStepError: They differ.
        """
        if [each is None for each in self.gradients] != [each is None for each in other.gradients]:
            raise IndivisibleStepError("some parameters have a gradient only if the batch is divided")
        gradients = [(own, its) for own, its in zip(self.gradients, other.gradients, strict=True) if own is not None]
        for what, pairs in (
            ("loss", [(self.losses, other.losses)]),
            ("gradients", gradients),
            ("buffers", list(zip(self.buffers, other.buffers, strict=True))),
        ):
            difference = max(_difference(pairs).tolist(), default=0.0)
            if difference > relative:
                raise IndivisibleStepError(
                    f"the {what} of a step differ by {difference:.2g} of their norm if the batch is divided, so the "
                    "loss is not a mean over samples that are independent of each other"
                )


def _difference(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Norm of the difference relative to the norm, [B], or [0] without pairs; 0 where both are not finite."""
    if not pairs:
        return torch.zeros(0)
    both = [(own.double(), its.to(own.device).double()) for own, its in pairs if its is not None]
    apart = torch.stack([_squares(own - its) for own, its in both]).sum(0)
    size = torch.stack([_squares(own) for own, _ in pairs]).sum(0)
    other = torch.stack([_squares(its) for _, its in both]).sum(0)
    relative = (apart / size.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    finite = size.isfinite(), other.isfinite()
    return relative.where(finite[0] & finite[1], torch.where(finite[0] == finite[1], 0.0, torch.inf))


def _squares(values: Tensor) -> Tensor:
    """Sum of the squares of each member's values, [B]."""
    return values.double().flatten(1).square().sum(1) if values.dim() > 1 else values.double().square()
