"""Several adapters of `peft` on one base model, which take turns."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rivals.rival import Cell, Rival, of_optimizers, rate

__all__ = ["AdapterTurns"]


class AdapterTurns(Rival):
    """`add_adapter` for each member, and `set_adapter` before each of its steps."""

    name = "peft, in turns"

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.batch = cell.batch()
        self.loss = cell.loss(0)
        self.model: Any = None
        for b, model in enumerate(cell.each_model()):
            if not hasattr(model, "peft_config"):
                raise ValueError("needs adapters of peft")
            torch.manual_seed(b)
            if self.model is None:
                self.model = model
            else:
                self.model.add_adapter(str(b), model.peft_config["default"])
        self.model.to(cell.device).train()
        self.names = ["default", *map(str, range(1, cell.members))]
        self.optimizers = []
        for b, name in enumerate(self.names):
            self.model.set_adapter(name)
            self.optimizers.append(cell.workload.phases[0].optimizer(self.model, rate(b)))

    def step(self) -> Tensor:
        losses = []
        for b, (name, optimizer) in enumerate(zip(self.names, self.optimizers, strict=True)):
            self.model.set_adapter(name)
            found = []
            for batch in self.cell.batches(b, self.batch):
                optimizer.zero_grad()
                loss = self.loss(self.model, batch)
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
            losses.append(torch.stack(found).mean())
        return torch.stack(losses)[None]

    def held(self) -> Iterable[Tensor]:
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        yield from of_optimizers(self.optimizers)
