"""Members one after another, as a plain loop trains them, compiled, and as adapters of one base."""

from typing import Any

import torch
from torch import Tensor, nn

from rivals.rival import Cell, Rival, rate

__all__ = ["AdapterTurns", "CompiledSerial", "Serial"]


class Serial(Rival):
    """Plain PyTorch."""

    name = "serial"

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.models = self.made()
        self.batches = [cell.batches(b, cell.batch()) for b in cell.numbers]
        phases = cell.workload.phases
        self.losses = [self.prepared(cell.loss(i)) for i in range(len(phases))]
        self.optimizers = [
            [phase.optimizer(self.turn(place), rate(b)) for phase in phases] for place, b in enumerate(cell.numbers)
        ]

    def made(self) -> list[nn.Module]:
        """The members' models."""
        return [*self.cell.models()]

    def prepared(self, loss: Any) -> Any:
        """The loss function that training calls."""
        return loss

    def turn(self, place: int) -> nn.Module:
        """The model of a member, ready to be trained."""
        return self.models[place]

    def step(self) -> Tensor:
        results = []
        for place, (optimizers, batches) in enumerate(zip(self.optimizers, self.batches, strict=True)):
            model = self.turn(place)
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


class CompiledSerial(Serial):
    """The same, forward and backward pass by `torch.compile`."""

    name = "serial, torch.compile"

    def prepared(self, loss: Any) -> Any:
        return torch.compile(loss, dynamic=False)


class AdapterTurns(Serial):
    """Adapters of `peft` on one base: `add_adapter` for each member, and `set_adapter` before each of its steps."""

    name = "peft, in turns"

    def made(self) -> list[nn.Module]:
        shared: Any = None
        for b, model in zip(self.cell.numbers, self.cell.models(), strict=True):
            if not hasattr(model, "peft_config"):
                raise ValueError("needs adapters of peft")
            if shared is None:
                shared = model
            else:
                shared.add_adapter(str(b), model.peft_config["default"])
        return [shared.to(self.cell.device)] * len(self.cell.numbers)

    def turn(self, place: int) -> nn.Module:
        model: Any = self.models[place]
        model.set_adapter(str(place) if place else "default")
        return model
