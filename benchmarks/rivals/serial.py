"""Members one after another, as a plain loop trains them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rivals.rival import Cell, Rival, of_optimizers, rate

__all__ = ["CompiledSerial", "Serial"]


class Serial(Rival):
    """Plain PyTorch.

    Args:
        cell: what to train.
        which: only these members.
    """

    name = "serial"

    def __init__(self, cell: Cell, which: Sequence[int] | None = None) -> None:
        super().__init__(cell)
        numbers = range(cell.members) if which is None else which
        self.models = cell.models(numbers)
        self.batches = [cell.batches(b, cell.batch()) for b in numbers]
        phases = cell.workload.phases
        self.losses = [self.prepared(cell.loss(i)) for i in range(len(phases))]
        self.optimizers = [
            [phase.optimizer(model, rate(b)) for phase in phases] for b, model in zip(numbers, self.models, strict=True)
        ]

    def prepared(self, loss: Any) -> Any:
        """The loss function that training calls."""
        return loss

    def step(self) -> Tensor:
        results = []
        for model, optimizers, batches in zip(self.models, self.optimizers, self.batches, strict=True):
            found = []
            for batch in batches:
                for loss_of, optimizer in zip(self.losses, optimizers, strict=True):
                    optimizer.zero_grad()
                    loss = loss_of(model, batch)
                    loss.backward()
                    optimizer.step()
                    found.append(loss.detach())
            results.append(torch.stack(found).view(len(batches), -1).mean(0))
        return torch.stack(results).T

    def held(self) -> Iterable[Tensor]:
        for model in self.models:
            for parameter in model.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            yield from model.buffers()
        yield from of_optimizers(optimizer for mine in self.optimizers for optimizer in mine)


class CompiledSerial(Serial):
    """The same, forward and backward pass by `torch.compile`."""

    name = "serial, torch.compile"

    def prepared(self, loss: Any) -> Any:
        return torch.compile(loss, dynamic=False)
