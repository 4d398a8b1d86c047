"""What a training step of a benchmark is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Batch", "Phase", "Workload"]

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Phase:
    """One optimizer's part of a step: loss, backward pass, update. A GAN has two.

    Args:
        loss: takes a model and a batch, returns a scalar.
        optimizer: made for a model, its learning rate multiplied by a factor.
    """

    loss: Callable[[Any, Batch], Tensor]
    optimizer: Callable[[Any, float], Optimizer]


@dataclass(frozen=True)
class Workload:
    """A model in training.

    Args:
        name: as in the table.
        sizes: in words.
        samples: in a batch.
        model: makes a member, from torch's default generator.
        others: make members that differ from it in submodules, by turns after it.
        batch: makes random data of the right shapes, on the CPU.
        phases: of a step, in order.
        batch_sizes: samples of a member's own batches, by turns, into which it divides `batch`; all of them if empty.
        draws: whether training draws random numbers (dropout), so that two ways of training it have other losses.
    """

    name: str
    sizes: str
    samples: int
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    phases: tuple[Phase, ...]
    draws: bool = False
    others: tuple[Callable[[], nn.Module], ...] = ()
    batch_sizes: tuple[int, ...] = ()
