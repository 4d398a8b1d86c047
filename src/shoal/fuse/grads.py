"""Gradient clipping, norms and scaling for the members of an array, each member separately."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.checks import parse_member_values
from shoal.fuse.constants import constant
from shoal.fuse.rows import unsqueeze_like

__all__ = ["Gradients", "clip_grad_norm_", "clip_grad_value_", "parse_thresholds"]


@dataclass(frozen=True)
class Gradients:
    """The gradients of an array after `backward`, to compute norms of them and to change them in place.

    Args:
        stacked: Gradients that all members have, [B, *shape] each.
        per_member: Gradients that only some members have: the member and its gradient, [*shape].
    """

    members: int
    stacked: Sequence[Tensor]
    per_member: Sequence[tuple[int, Tensor]]

    @classmethod
    def of(cls, array: ModelArray, params: Collection[int] | None = None) -> "Gradients":
        """Collect the existing gradients of an array, or only those of the members' own `params`, given by `id`."""
        stacked = []
        per_member = [
            (b, p.grad)
            for _, b, p in array.unfused_parameters()
            if p.grad is not None and (params is None or id(p) in params)
        ]
        for _, data, own in array.stacked_tensors():
            if data.grad is None:
                continue
            counted: Sequence[int] = range(len(own))
            if params is not None:
                counted = [b for b, p in enumerate(own) if id(p) in params]
            if len(counted) == len(own):
                stacked.append(data.grad)
            else:
                per_member += [(b, data.grad[b]) for b in counted]
        return cls(len(array), stacked, per_member)

    def norms(self, order: float) -> Tensor:
        """Each member's norm over all of its gradients, [B]: the norm of the gradients' norms, as torch computes it."""
        parts = [
            torch.linalg.vector_norm(grad.unsqueeze(-1), order, dim=tuple(range(1, grad.dim() + 1)))
            for grad in self.stacked
        ]
        if self.per_member:
            owners, grads = zip(*self.per_member, strict=True)
            own = torch.stack(torch._foreach_norm(grads, order))
            neutral = own.new_full((len(grads), self.members), 0.0 if order >= 0 else inf)
            places = (constant(each, torch.int64, own.device) for each in (range(len(grads)), owners))
            neutral[tuple(places)] = own
            parts.extend(neutral)
        if not parts:
            return torch.zeros(self.members)
        norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), order, dim=0)
        return norms

    def multiply_(self, factors: Tensor) -> None:
        """Multiply each member's gradients by its factor, [B]."""
        grads, each = self._broadcast(factors)
        if grads:
            torch._foreach_mul_(grads, each)

    def clip_(self, max_norms: Tensor, norms: Tensor) -> None:
        """Scale each member's gradients down from its norm to at most its maximum norm, both [B]."""
        limits = _on_device(max_norms, norms.dtype, norms.device)
        factors = (limits / (norms + 1e-6)).clamp(max=1.0)
        self.multiply_(torch.where(limits == inf, 1.0, factors))  # also for a norm that is not finite

    def clamp_(self, clip_values: Tensor) -> None:
        """Clamp the elements of each member's gradients to ± its clip value, [B]."""
        grads, each = self._broadcast(clip_values)
        if grads:
            bounds = [value.to(grad.dtype) for value, grad in zip(each, grads, strict=True)]
            torch._foreach_clamp_min_(grads, torch._foreach_neg(bounds))
            torch._foreach_clamp_max_(grads, bounds)

    def _broadcast(self, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """All gradients, and for each one the members' values, [B], on its device and shaped to broadcast to it."""
        grads = [*self.stacked, *(grad for _, grad in self.per_member)]
        if grads:
            values = _on_device(values, values.dtype, grads[0].device)
        return grads, [
            *(unsqueeze_like(values, grad) for grad in self.stacked),
            *(values[b] for b, _ in self.per_member),
        ]


def _on_device(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The members' values, [B], on a device; those of the host are copied there once."""
    return values.to(dtype) if values.device == device else constant(values.tolist(), dtype, device)


@torch.no_grad()
def clip_grad_norm_(
    array: ModelArray,
    max_norm: float | Sequence[float] | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale each member's gradients down to a norm, as `torch.nn.utils.clip_grad_norm_` does for one model.

    Args:
        array: Array after `backward`.
        max_norm: Largest norm, one number for all members or one for each.
        norm_type: Order of the norm; may be `inf`.
        error_if_nonfinite: Whether to raise, before anything is scaled, if a member's norm is not finite.

    Returns:
        Each member's norm before clipping, [B].

    Raises:
        FusionError: `max_norm` has neither one value nor one for each member, or has a negative one; or `norm_type` is
            not a number.
        RuntimeError: A norm is not finite, and `error_if_nonfinite` is set; names the members.
    """
    max_norms = parse_thresholds(array, max_norm, "max_norm")
    gradients = Gradients.of(array)
    norms = gradients.norms(_parse_order(norm_type))
    if error_if_nonfinite and not torch.isfinite(norms).all():
        bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
        raise RuntimeError(f"the gradient norm (order {norm_type}) of members {bad} is not finite; nothing was clipped")
    gradients.clip_(max_norms, norms)
    return norms


@torch.no_grad()
def clip_grad_value_(array: ModelArray, clip_value: float | Sequence[float] | Tensor) -> None:
    """Clamp each element of a member's gradients to ±clip_value, as `torch.nn.utils.clip_grad_value_` does.

    Args:
        array: Array after `backward`.
        clip_value: Limit, one number for all members or one for each.

    Raises:
        FusionError: `clip_value` has neither one value nor one for each member, or a negative one.
    """
    clip_values = parse_thresholds(array, clip_value, "clip_value")
    Gradients.of(array).clamp_(clip_values)


def parse_thresholds(array: ModelArray, given: float | Sequence[float] | Tensor, name: str) -> Tensor:
    """Check clipping thresholds, and return them as one number per member, [B] float64."""
    if not isinstance(array, ModelArray):
        raise FusionError(
            f"`array` must be what `fuse` made, got {type(array).__name__}; for one model use torch.nn.utils"
        )
    array.check_present()
    thresholds = parse_member_values(given, name, len(array), torch.float64)
    if not bool((thresholds >= 0).all()):
        raise FusionError(f"`{name}` must not be negative, got {given}")
    return thresholds


def _parse_order(norm_type: object) -> float:
    try:
        return float(norm_type)  # type: ignore[arg-type]  # torch takes the string "inf" as well
    except (TypeError, ValueError):
        raise FusionError(f"`norm_type` must be the order of a norm, a number or inf, got {norm_type!r}") from None
