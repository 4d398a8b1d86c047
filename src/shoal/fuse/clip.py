"""Gradient clipping for each member of an array by itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import FusionError
from shoal.fuse.array import ModelArray

__all__ = ["clip_grad_norm_", "scale_to_norm_", "total_norms"]


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
        FusionError: `max_norm` has neither one value nor one for each member.
        RuntimeError: a norm is not finite, and `error_if_nonfinite` is set; names the members.
    """
    if not isinstance(array, ModelArray):
        raise FusionError(
            f"`array` must be what `fuse` made, got {type(array).__name__}; for one model there is torch.nn.utils"
        )
    limits = torch.as_tensor(max_norm, dtype=torch.float64)
    if limits.shape not in ((), (len(array),)):
        raise FusionError(f"`max_norm` must be one number or {len(array)}, got shape {tuple(limits.shape)}")
    if not bool((limits >= 0).all()):
        raise FusionError(f"`max_norm` must not be negative, got {max_norm}")
    grads = [param.grad for param in array.parameters() if param.grad is not None]
    if not grads:
        return torch.zeros(len(array))
    norms = total_norms(grads, norm_type)
    if error_if_nonfinite and not torch.isfinite(norms).all():
        bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
        raise RuntimeError(f"the gradient norm (order {norm_type}) of members {bad} is not finite; nothing was clipped")
    scale_to_norm_(grads, norms, limits.to(norms))
    return norms


def total_norms(grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Each member's norm over all of its gradients, [B]; may be traced.

    Args:
        grads: at least one, [B, *shape] each.
        norm_type: order of the norm.
    """
    parts = [torch.linalg.vector_norm(grad.reshape(len(grad), -1), norm_type, dim=1) for grad in grads]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type, dim=0)
    return norms


def scale_to_norm_(grads: Sequence[Tensor], norms: Tensor, max_norm: Tensor) -> None:
    """Multiply gradients by min(1, max_norm / (norm + 1e-6)), in place; may be traced.

    Args:
        grads: [B, *shape] each.
        norms: the members', [B].
        max_norm: 0-dim or [B], on the device of `norms`.
    """
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)))
