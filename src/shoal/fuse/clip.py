"""Gradient clipping for each member of an array by itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.checks import numbers_of
from shoal.fuse.grads import Gradients

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


@torch.no_grad()
def clip_grad_norm_(
    array: ModelArray,
    max_norm: float | Sequence[float] | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale each member's gradients down to a norm, as `torch.nn.utils.clip_grad_norm_` does for one model.

    Args:
        array: the models, after `backward`.
        max_norm: for all members, or one for each.
        norm_type: order of the norm; may be `inf`.
        error_if_nonfinite: raise, before anything is scaled, if a member's norm is not finite.

    Returns:
        Each member's norm before clipping, [B].

    Raises:
        FusionError: `max_norm` has neither one value nor one for each member, or a negative one; or `norm_type` is no
            number.
        RuntimeError: a norm is not finite, and `error_if_nonfinite` is set; names the members.
    """
    limits = _limits(array, max_norm, "max_norm")
    gradients = Gradients.of(array)
    norms = gradients.norms(_order(norm_type))
    if error_if_nonfinite and not torch.isfinite(norms).all():
        bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
        raise RuntimeError(f"the gradient norm (order {norm_type}) of members {bad} is not finite; nothing was clipped")
    gradients.multiply_((limits.to(norms) / (norms + 1e-6)).clamp(max=1.0))
    return norms


@torch.no_grad()
def clip_grad_value_(array: ModelArray, clip_value: float | Sequence[float] | Tensor) -> None:
    """Bring each element of a member's gradients to within ±clip_value, as `torch.nn.utils.clip_grad_value_` does.

    Args:
        array: the models, after `backward`.
        clip_value: for all members, or one for each.

    Raises:
        FusionError: `clip_value` has neither one value nor one for each member, or a negative one.
    """
    limits = _limits(array, clip_value, "clip_value")
    Gradients.of(array).clamp_(limits)


def _limits(array: ModelArray, given: float | Sequence[float] | Tensor, name: str) -> Tensor:
    """What was given as a number for each member, [B] float64."""
    if not isinstance(array, ModelArray):
        raise FusionError(
            f"`array` must be what `fuse` made, got {type(array).__name__}; for one model there is torch.nn.utils"
        )
    array.check_present()
    limits = numbers_of(given, name, len(array), torch.float64)
    if not bool((limits >= 0).all()):
        raise FusionError(f"`{name}` must not be negative, got {given}")
    return limits


def _order(norm_type: object) -> float:
    try:
        return float(norm_type)  # type: ignore[arg-type]  # torch takes the string "inf" as well
    except (TypeError, ValueError):
        raise FusionError(f"`norm_type` must be the order of a norm, a number or inf, got {norm_type!r}") from None
