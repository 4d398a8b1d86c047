"""Members as one array of Shoal: eager, and in the step mode that Shoal itself chooses."""

import torch
from models import Batch
from torch import Tensor

from rivals.rival import Cell, Rival, rate
from shoal.fuse.api import fuse
from shoal.fuse.backward import MemberSteps
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import StepMode, TrainingStep

__all__ = ["Chosen", "Eager"]


class Eager(Rival):
    """`ModelArray.map`, backward pass, fused optimizer."""

    name = "Shoal eager"

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.batch = cell.batch()
        self.array = fuse(cell.models(), seeds=cell.numbers, strict=not cell.workload.others)
        models = self.array.members
        phases = cell.workload.phases
        self.losses = [cell.loss(i) for i in range(len(phases))]
        self.optimizers = [
            fuse_optimizers(
                [phase.optimizer(model, rate(b)) for b, model in zip(cell.numbers, models, strict=True)], self.array
            )
            for phase in phases
        ]

    def step(self) -> Tensor:
        return torch.stack([self.take(phase) for phase in range(len(self.losses))])

    def take(self, phase: int) -> Tensor:
        """One phase of a step; returns the losses, [B]."""
        optimizer = self.optimizers[phase]
        optimizer.zero_grad()
        losses = self.array.map(self.losses[phase], self.batch)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()


class Chosen(Eager):
    """`TrainingStep`: in the step mode that it finds the fastest.

    Args:
        cell: what to train.
        compiling: whether it may try to compile.
    """

    name = "Shoal"

    def __init__(self, cell: Cell, compiling: bool = True) -> None:
        super().__init__(cell)
        self.parts = _parts(cell, self.batch)
        modes: tuple[StepMode, ...] = ("eager", "captured", "compiled", *(["plain"] if not self.parts else []))
        self.steps = [
            TrainingStep(self.array, optimizer, loss, modes, compiling=lambda seconds: compiling)
            for optimizer, loss in zip(self.optimizers, self.losses, strict=True)
        ]

    def take(self, phase: int) -> Tensor:
        step = self.steps[phase]
        if not self.parts:
            return step(self.batch)
        updates = torch.stack([part.ends for part in self.parts]).sum(0)
        return torch.stack([step(part) for part in self.parts]).sum(0) / updates.to(self.cell.device)

    def warm_up(self, steps: int) -> list[Tensor]:
        losses = super().warm_up(steps)
        while any(step.mode is None for step in self.steps):
            self.step()
        return losses

    def note(self) -> str:
        return ", ".join(str(step.mode) for step in self.steps)


def _parts(cell: Cell, batch: Batch) -> list[MemberSteps]:
    """Micro-batches of the smallest batch size, of which each member's steps take as many as its own has."""
    if not cell.workload.batch_sizes:
        return []
    smallest = min(cell.workload.batch_sizes)
    counts = torch.tensor([len(cell.batches(b, batch)[0][0]) // smallest for b in cell.numbers])
    return [
        MemberSteps(tuple(part), 1 / counts.double(), number % counts == 0, (number + 1) % counts == 0)
        for number, part in enumerate(zip(*(tensor.split(smallest) for tensor in batch), strict=True))
    ]
