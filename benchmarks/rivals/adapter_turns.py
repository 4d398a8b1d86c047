"""Several adapters of `peft` on one base model, which take turns."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from models.peft_llama import Adapter
from torch import Tensor

from rivals.rival import Cell, Rival, of_optimizers, rate

__all__ = ["AdapterTurns"]


class AdapterTurns(Rival):
    """`add_adapter` for each member, and `set_adapter` before each of its steps.

    Args:
        cell: what to train.
        adapters: of the members, by turns.
        base: makes the base model.
    """

    name = "peft, in turns"

    def __init__(self, cell: Cell, adapters: Sequence[Adapter], base: Callable[[], Any]) -> None:
        from peft import get_peft_model

        super().__init__(cell)
        self.batch = cell.batch()
        self.loss = cell.loss(0)
        self.model: Any = None
        for b in range(cell.members):
            config = adapters[b % len(adapters)].config()
            torch.manual_seed(b)
            with cell.device:
                if self.model is None:
                    self.model = get_peft_model(base(), config, adapter_name="0")
                else:
                    self.model.add_adapter(str(b), config)
        self.model.to(cell.device).train()
        self.optimizers = []
        for b in range(cell.members):
            self.model.set_adapter(str(b))
            self.optimizers.append(cell.workload.phases[0].optimizer(self.model, rate(b)))

    def step(self) -> Tensor:
        losses = []
        for b, optimizer in enumerate(self.optimizers):
            self.model.set_adapter(str(b))
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
