"""Gradient accumulation: the micro-batches of one training step, with a weight for each loss."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["MicroBatches", "micro_batches", "total", "weighted"]


class MicroBatches(NamedTuple):
    """The batches of one training step with gradient accumulation; its loss is the sum of theirs with these weights."""

    batches: tuple[Any, ...]
    weights: tuple[float, ...]


def micro_batches(batch: Any) -> list[tuple[Any, float]]:
    """The batches of a step with their weights: those of `MicroBatches`, or any other batch with weight 1."""
    if isinstance(batch, MicroBatches):
        return list(zip(batch.batches, batch.weights, strict=True))
    return [(batch, 1.0)]


def weighted(loss: Tensor, weight: float) -> Tensor:
    """The loss times the weight of its batch."""
    return loss if weight == 1.0 else weight * loss


def total(losses: Sequence[Tensor]) -> Tensor:
    """The loss of a step from the weighted losses of its batches."""
    return losses[0] if len(losses) == 1 else torch.stack([*losses]).sum(0)
