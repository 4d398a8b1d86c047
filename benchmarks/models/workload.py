"""What a training step of a benchmark is made of, and the parts that workloads have in common.

All of it can be pickled, since the processes of a rival get whole workloads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Batch", "Phase", "Workload", "adadelta", "adam", "cross_entropy", "pictures", "tokens"]

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Phase:
    """One optimizer's part of a step: loss, backward pass, update. A GAN has two.

    Args:
        loss: Takes a model and a batch, returns a scalar.
        optimizer: Made for a model, its learning rate multiplied by a factor.
    """

    loss: Callable[[Any, Batch], Tensor]
    optimizer: Callable[[Any, float], Optimizer]


@dataclass(frozen=True)
class Workload:
    """A model in training.

    Args:
        sizes: Sizes in words.
        samples: Samples in a batch.
        model: Makes a member, from torch's default generator.
        batch: Makes random data of the right shapes, on the CPU.
        phases: Phases of a step, in order.
        draws: Whether training draws random numbers (dropout), so that two ways of training it have other losses.
        others: Make members that differ from it in submodules, by turns after it.
        bfloat16: Whether parameters are of bfloat16.
        batch_sizes: Samples of a member's own batches, by turns, into which it divides `batch`; all of them if empty.
    """

    sizes: str
    samples: int
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    phases: tuple[Phase, ...]
    draws: bool = False
    others: tuple[Callable[[], nn.Module], ...] = ()
    bfloat16: bool = False
    batch_sizes: tuple[int, ...] = ()


def cross_entropy(net: nn.Module, batch: Batch) -> Tensor:
    """The loss of a classifier of inputs, or of every token of sequences."""
    x, y = batch
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def adam(net: nn.Module, factor: float) -> Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-3 * factor)


def adadelta(net: nn.Module, factor: float) -> Optimizer:
    return torch.optim.Adadelta(net.parameters(), lr=factor)


def pictures(samples: int, classes: int) -> Batch:
    """Random pictures of 32 x 32 pixels, and their classes."""
    return torch.randn(samples, 3, 32, 32), torch.randint(0, classes, (samples,))


def tokens(samples: int, length: int, words: int) -> Batch:
    """Random sequences, and the tokens that follow theirs."""
    following = torch.randint(0, words, (2, samples, length))
    return following[0], following[1]
