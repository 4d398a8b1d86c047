"""`torch.func.vmap` over `stack_module_state`, as PyTorch's tutorial on model ensembling has it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.optim import Optimizer

from rivals.rival import Cell, Rival

__all__ = ["VMap"]

WITH_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class Losses(nn.Module):
    """A model whose `forward` is a training loss, which is what `functional_call` can call."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class VMap(Rival):
    """One optimizer over stacked parameters: member 0's learning rate for all, as it knows no other.

    It is given all that helps it: frozen parameters, which are equal in the benchmark's models, are passed once, and
    the optimizer is torch's fused one where there is one.
    """

    name = "vmap"

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        if cell.workload.batch_sizes:
            raise ValueError(f"needs one batch size for all members, got {cell.workload.batch_sizes}")
        models = [*cell.models()]
        self.batch = cell.batch()
        params, buffers = stack_module_state(models)
        frozen = {name: p.detach() for name, p in models[0].named_parameters() if not p.requires_grad}
        self.params = {f"model.{name}": frozen.get(name, p) for name, p in params.items()}
        self.buffers = {f"model.{name}": buffer for name, buffer in buffers.items()}
        self.axes = ({f"model.{name}": None if name in frozen else 0 for name in params}, 0)
        phases = cell.workload.phases
        self.optimizers = [self._optimizer(phase.optimizer(models[0], 1.0), models[0]) for phase in phases]
        self.functions = [self._function(Losses(models[0], cell.loss(i))) for i in range(len(phases))]

    def step(self) -> Tensor:
        results = []
        for function, optimizer in zip(self.functions, self.optimizers, strict=True):
            optimizer.zero_grad()
            losses = function(self.params, self.buffers)
            losses.sum().backward()
            optimizer.step()
            results.append(losses.detach())
        return torch.stack(results)

    def _optimizer(self, own: Optimizer, model: nn.Module) -> Optimizer:
        """An optimizer of the same class and settings on the stacked parameters."""
        names = {id(p): f"model.{name}" for name, p in model.named_parameters()}
        (group,) = own.param_groups
        settings = {name: value for name, value in own.defaults.items() if name != "fused"}
        if type(own) in WITH_FUSED:
            settings.update(fused=True, foreach=False)
        if isinstance(own, torch.optim.AdamW):
            settings.pop("decoupled_weight_decay")
        return type(own)([self.params[names[id(p)]] for p in group["params"]], **settings)

    def _function(self, template: Losses) -> Any:
        run = partial(_call, template, self.batch)
        return torch.func.vmap(run, in_dims=self.axes, randomness="different")


def _call(template: Losses, batch: Any, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
    return functional_call(template, (params, buffers), (batch,))
