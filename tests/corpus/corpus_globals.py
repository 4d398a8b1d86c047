"""Programs that keep something outside of the model: globals, class attributes, containers of the task."""

import functools
from typing import Any, ClassVar

import numpy as np
import torch
from corpus_base import FEATURES, Program
from torch import Tensor, nn

CALLS = 0
TABLES: dict[int, Tensor] = {}
LOSSES: list[float] = []
STATE: dict[str, Any] = {}
CENTRE = torch.zeros(FEATURES, dtype=torch.float64)
TOTALS = np.zeros(FEATURES)
NUMBERS = np.random.default_rng(0)


class GlobalCounter(Program):
    """A global counts the training steps of the process; a penalty grows with it."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        global CALLS
        if not model.training:
            return super().loss(model, batch)
        CALLS += 1
        return super().loss(model, batch) * min(1.0, 0.1 * CALLS)


class GlobalCache(Program):
    """Tables by length in a global dict, the same for all models."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.linspace(0, 1, len(x), dtype=x.dtype).unsqueeze(1)
        return super().loss(model, (x + TABLES[len(x)], y))


class GlobalLog(Program):
    """Losses as floats in a global list that nobody reads back."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        LOSSES.append(loss.item())
        return loss


class GlobalTensor(Program):
    """The last features in a global dict, which the next step's are compared with."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            y = model(batch[0]).mean()
            loss = loss + (y - STATE.get("last", 0.0)) ** 2
            STATE["last"] = y.detach()
        return loss


class ClassCounter(Program):
    """A counter in a class attribute of the module, counted over all instances."""

    class Net(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                type(self).calls += 1
            return super().forward(x) / (1 + 0.01 * type(self).calls)

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 1))


class TaskHistory(Program):
    """A list of the task's, to which detached losses go; it is read back."""

    def __init__(self) -> None:
        self.history: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            self.history.append(loss.detach())
            loss = loss / torch.stack(self.history[-2:]).mean()
        return loss


@functools.lru_cache(maxsize=4)
def basis(rows: int) -> Tensor:
    return torch.eye(rows, dtype=torch.float64) * 0.5


class GlobalMemo(Program):
    """`lru_cache` on a global function that makes a matrix."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, (basis(len(batch[0])) @ batch[0], batch[1]))


class CounterOfForward(Program):
    """A global dict counts in the model's `forward`, which no method of the task names."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                STATE["steps"] = STATE.get("steps", 0) + 1
            return super().forward(x) / (1 + 0.01 * STATE.get("steps", 0))

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 1))


class ContainerOfClass(Program):
    """The last features in a dict of the module's class, in which the next step reads them."""

    class Net(nn.Sequential):
        features: ClassVar[dict[str, Tensor]] = {}

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            last = self.features.get("last", 0.0)
            if self.training:
                self.features["last"] = y.detach().mean(0)
            return y - 0.5 * last

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 1))


class GlobalCentre(Program):
    """A running mean of the inputs in a global tensor, which is changed in place."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if model.training:
            CENTRE.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return super().loss(model, (x - CENTRE, y))


class GlobalArray(Program):
    """Sums of the inputs in a global array, which is changed in place."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if model.training:
            np.add(TOTALS, x.numpy().mean(0), out=TOTALS)
        return super().loss(model, (x - 0.1 * torch.from_numpy(TOTALS.copy()), y))


class GlobalGenerator(Program):
    """A global generator draws a weight for each step."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * NUMBERS.uniform(0.5, 1.5) if model.training else loss


class LateGlobal(Program):
    """A global changes for the first time in the sixth step."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            return super().loss(model, batch)
        model.steps = getattr(model, "steps", 0) + 1
        CENTRE.add_(float(model.steps > 5))
        return super().loss(model, batch) / (1 + CENTRE.mean())
