"""The contract of a way to train B models side by side."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from models import Batch, Workload
from torch import Tensor, nn
from torch.optim import Optimizer

from rivals.memory import peak_of_step

__all__ = ["Cell", "Rival", "moved", "of_optimizers", "rate"]


@dataclass(frozen=True)
class Cell:
    """What all rivals are to train.

    Args:
        workload: model, data, losses.
        members: B.
        device: of models and data.
        autocast: to this type; None for plain float32.
        threads: of torch, for a rival that trains in this process.
    """

    workload: Workload
    members: int
    device: torch.device
    autocast: torch.dtype | None
    threads: int

    def models(self, which: Sequence[int] | None = None) -> list[nn.Module]:
        """Members by their numbers, each from its own seed; by default all."""
        return list(self.each_model(which))

    def each_model(self, which: Sequence[int] | None = None) -> Iterator[nn.Module]:
        """Yield the same one after another, so that only what they do not share is there for each."""
        kinds = (self.workload.model, *self.workload.others)
        for b in range(self.members) if which is None else which:
            torch.manual_seed(b)
            with self.device:  # a large model takes minutes to be made on a CPU
                model = kinds[b % len(kinds)]().to(self.device)
            yield model

    def batch(self) -> Batch:
        torch.manual_seed(len(self.workload.name))
        return moved(self.workload.batch(), self.device)

    def batches(self, b: int, batch: Batch) -> list[Batch]:
        """Member b's own batches of a step."""
        sizes = self.workload.batch_sizes or (self.workload.samples,)
        return [*zip(*(tensor.split(sizes[b % len(sizes)]) for tensor in batch), strict=True)]

    def loss(self, phase: int) -> Callable[[Any, Batch], Tensor]:
        """A phase's loss, under autocast if that is asked for."""
        own = self.workload.phases[phase].loss
        return own if self.autocast is None else partial(_autocast, own, self.device.type, self.autocast)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Rival(ABC):
    """One way of training, with models of its own; equal weights, data and learning rates to begin with.

    A rival is made, takes a few steps whose losses are held against the others', and is then timed in rounds.
    """

    name: ClassVar[str]

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    @abstractmethod
    def step(self) -> Tensor | None:
        """One step of all members; returns their losses, [phases, B], or None where they stay in other processes."""

    @abstractmethod
    def held(self) -> Iterable[Tensor]:
        """Tensors that live from step to step: weights, buffers, gradients, state of optimizers."""

    def run(self, steps: int) -> float:
        """Seconds that so many steps take."""
        self.cell.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.cell.wait()
        return time.perf_counter() - began

    def warm_up(self, steps: int) -> list[Tensor]:
        """Get ready to be timed; returns the losses of the first so many steps, if there are any to see."""
        losses = [self.step() for _ in range(steps)]
        return [loss.float().cpu() for loss in losses if loss is not None]

    def peak_bytes(self) -> int | None:
        """The most memory that tensors take during a step, or None where it cannot be said."""
        return peak_of_step(self.step, self.held(), self.cell.device)

    def note(self) -> str:
        """What else the table should say of it."""
        return ""

    def close(self) -> None:
        """Let the device finish; end what was started."""
        self.cell.wait()


def rate(b: int) -> float:
    """Member b's learning rate, as a factor of the workload's."""
    return 1 + b / 16


def moved(batch: Batch, device: torch.device) -> Batch:
    return tuple(tensor.to(device) for tensor in batch)


def of_optimizers(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The tensors of their state."""
    return [t for o in optimizers for state in o.state.values() for t in state.values() if isinstance(t, Tensor)]


def _autocast(own: Callable[[Any, Batch], Tensor], kind: str, dtype: torch.dtype, model: Any, batch: Batch) -> Tensor:
    with torch.autocast(kind, dtype):
        return own(model, batch)
