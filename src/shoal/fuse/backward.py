"""Losses and backward passes of a training step, in one or more micro-batches, of one model or of an array."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.constants import constant, to_device
from shoal.fuse.scaler import GradScaler, LossScale
from shoal.fuse.shard import Shard, use_shard

__all__ = [
    "MemberSteps",
    "MicroBatches",
    "backward",
    "backward_alone",
    "micro_batches",
    "one_loss",
    "total",
    "weighted",
]


class MicroBatches(NamedTuple):
    """The batches of one training step with gradient accumulation; its loss is the sum of theirs with these weights."""

    batches: tuple[Any, ...]
    weights: tuple[float, ...]


class MemberSteps(NamedTuple):
    """A batch of an array whose members' training steps have different numbers of batches.

    Args:
        batch: The batch, shared or stacked.
        weights: Weight of the batch in the loss of each member's step, [B].
        begins: Whether the batch begins the step of each member, bool [B].
        ends: Whether the batch ends the step of each member, bool [B].
    """

    batch: Any
    weights: Tensor
    begins: Tensor
    ends: Tensor

    def to(self, device: torch.device) -> "MemberSteps":
        """Return a copy whose weights and masks are on a device."""
        return MemberSteps(self.batch, *(constant(each.tolist(), each.dtype, device) for each in self[1:]))


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


def micro_batches(batch: Any) -> list[tuple[Any, Any]]:
    """The batches of a step with their weights: those of `MicroBatches`, or any other batch with weight 1.

    The weight of the batch of `MemberSteps` is a tensor, [B].
    """
    if isinstance(batch, MemberSteps):
        return [(batch.batch, batch.weights)]
    if isinstance(batch, MicroBatches):
        return list(zip(batch.batches, batch.weights, strict=True))
    return [(batch, 1.0)]


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The loss times the weight of its batch, or the losses, [B], times the members' weights."""
    if isinstance(weight, Tensor):
        return loss * to_device(weight.to(loss.dtype), loss.device)
    return loss if weight == 1.0 else weight * loss


def total(losses: Sequence[Tensor]) -> Tensor:
    """The loss of a step from the weighted losses of its batches."""
    return losses[0] if len(losses) == 1 else torch.stack([*losses]).sum(0)


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
