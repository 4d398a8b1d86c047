"""Losses and backward passes of a training step: of all members of an array at once, and of a single model."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.loss_scale import LossScale
from shoal.fuse.micro_batches import micro_batches, total, weighted
from shoal.fuse.scaler import GradScaler
from shoal.fuse.shard import Shard, use_shard

__all__ = ["backward", "backward_alone", "one_loss"]


def backward(
    array: ModelArray, loss: Callable[..., Any], scaler: GradScaler, batch: Any, shards: Sequence[Shard] = ()
) -> Tensor:
    """Add the scaled gradients of a step to those of the array; returns the detached losses, [B].

    Args:
        shards: The part of the whole batch that each (micro-)batch is, if several processes compute the gradients.
    """
    taken = []
    for number, (part, weight) in enumerate(micro_batches(batch)):
        with use_shard(shards[number] if shards else None):
            losses = weighted(_one_for_each(array.map(loss, part), len(array)), weight)
            scaler.scale(losses).sum().backward()  # type: ignore[no-untyped-call]
        taken.append(losses.detach())
    return total(taken)


def backward_alone(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[int, Any], Tensor],
    batch: Any,
    scale: LossScale | None,
    max_norm: float | None,
    after_each: Callable[[], None] = lambda: None,
) -> Tensor:
    """Add the gradients of a step to those of one model, unscaled and clipped; returns its detached loss.

    Args:
        loss: Function of the number of a batch within the step and the batch, which returns the loss.
    """
    taken = []
    for number, (part, weight) in enumerate(micro_batches(batch)):
        found = weighted(loss(number, part), weight)
        (found if scale is None else scale.scaled(found)).backward()  # type: ignore[no-untyped-call]
        after_each()
        taken.append(found.detach())
    if scale is not None:
        scale.unscale_(optimizer)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return total(taken)


def one_loss(returned: Any) -> Tensor:
    """Check one member's loss, and return it with shape []."""
    if not isinstance(returned, Tensor):
        raise FusionError(_not_scalar(type(returned).__name__))
    if returned.numel() != 1:
        raise FusionError(_not_scalar(f"a tensor of shape {tuple(returned.shape)}"))
    _check_graph(returned)
    return returned if returned.dim() == 0 else returned.reshape(())


def _one_for_each(returned: Any, members: int) -> Tensor:
    if not isinstance(returned, Tensor):
        raise FusionError(_not_scalar(type(returned).__name__))
    if returned.numel() != members:
        raise FusionError(_not_scalar(f"a tensor of shape {tuple(returned.shape[1:])}"))
    _check_graph(returned)
    return returned.reshape(members)


def _check_graph(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise FusionError(
            "`loss` returned a number that depends on no parameter (by `.item()`, `.detach()`, `torch.no_grad()`, or "
            "because all parameters are frozen), so there is no gradient to compute; return the loss itself"
        )


def _not_scalar(found: str) -> str:
    return f"`loss` must return a scalar tensor for a model and a batch, its mean or sum, got {found}"
