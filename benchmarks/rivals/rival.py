"""The contract of a way to train B models side by side."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from models import Batch, Workload
from torch import Tensor, nn

__all__ = ["Cell", "Rival", "rate"]


@dataclass(frozen=True)
class Cell:
    """Models that all rivals are to train.

    Args:
        workload: Model, data, losses.
        members: B.
        device: Of models and data.
        autocast: To this type; None for plain float32.
        threads: Of torch, for a rival that trains in this process.
        which: Numbers of the members that a rival trains; None: all.
    """

    workload: Workload
    members: int
    device: torch.device
    autocast: torch.dtype | None
    threads: int
    which: Sequence[int] | None = None

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the members that a rival trains."""
        return range(self.members) if self.which is None else self.which

    def models(self) -> Iterator[nn.Module]:
        """Yield the members, each from its own seed."""
        kinds = (self.workload.model, *self.workload.others)
        for b in self.numbers:
            torch.manual_seed(b)
            with self.device:  # a large model takes minutes to be made on a CPU
                model = kinds[b % len(kinds)]().to(self.device)
            yield model

    def batch(self) -> Batch:
        torch.manual_seed(0)
        return tuple(tensor.to(self.device) for tensor in self.workload.batch())

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
    elsewhere = 0
    """Bytes that its other processes take on a GPU, at their peak."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    @abstractmethod
    def step(self) -> Tensor | None:
        """One step of all members; returns their losses, [phases, B], or None where they stay in other processes."""

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

    def note(self) -> str:
        """Return a note for the table."""
        return ""

    def close(self) -> None:
        """Let the device finish; end what was started."""
        self.cell.wait()


def rate(b: int) -> float:
    """Member b's learning rate, as a factor of the workload's."""
    return 1 + b / 16


def _autocast(own: Callable[[Any, Batch], Tensor], kind: str, dtype: torch.dtype, model: Any, batch: Batch) -> Tensor:
    with torch.autocast(kind, dtype):
        return own(model, batch)
