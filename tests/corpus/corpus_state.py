"""Programs that keep state on the model: buffers, plain attributes, tensors on `self`, hooks, caches."""

import copy
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus_base import FEATURES, Labels, Program
from torch import Tensor, nn


def head(inputs: int = FEATURES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 1))


class CumulativeMean(Program):
    """Centres by the mean of all rows so far, in buffers that are replaced."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head()
            self.register_buffer("mean", torch.zeros(FEATURES))
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.rows = self.rows + len(x)
                self.mean = self.mean + (x.mean(0) - self.mean) * len(x) / self.rows
            return self.head(x - self.mean)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class BuffersInPlace(Program):
    """Statistics written in place under no_grad, of what the model itself computes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, 5), nn.Linear(5, 1)
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            if self.training:
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(h.abs().mean(0), alpha=0.1)
            return self.outer(h / self.scale)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class BuffersSwapped(Program):
    """Two buffers change places at every forward pass of a training."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head()
            self.register_buffer("now", torch.zeros(FEATURES))
            self.register_buffer("before", torch.ones(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.now, self.before = self.before, self.now
                self.now.add_(0.1 * self.head[0].weight.detach().mean(0))
            return self.head(x + self.now - self.before)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class WeightAverage(Program):
    """An exponential average of the weights in a module of its own, updated in the loss; it teaches, too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = head()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.student(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            with torch.no_grad():
                for mean, weight in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                    mean.mul_(0.9).add_(weight, alpha=0.1)
        return super().loss(model, batch) + 0.1 * F.mse_loss(model(batch[0]), model.teacher(batch[0]))


class TargetNetwork(Program):
    """A target that is copied from the online network every third step, as in Q-learning."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = head(), head().requires_grad_(False)
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.online(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if model.training:
            if model.steps % 3 == 0:
                model.target.load_state_dict(model.online.state_dict())
            model.steps += 1
        return F.mse_loss(model(x), y + 0.5 * model.target(x.flip(0)).detach())


class Curriculum(Program):
    """Counts forward passes in an attribute, and uses more of the input with each."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.seen = head(), 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += 1
            x = x.clone()
            x[:, min(FEATURES, 2 + self.seen // 2) :] = 0
            return self.head(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class SmoothingSchedule(Labels):
    """Label smoothing that fades, a float on the model."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.smoothing = 0.3
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            return super().loss(model, batch)
        model.smoothing *= 0.9
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=model.smoothing)


class MomentumSchedule(Program):
    """The momentum of batch norm falls with every training step."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self[1].momentum = max(0.01, self[1].momentum * 0.8)
            return super().forward(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, momentum=0.5), nn.Tanh(), nn.Linear(5, 1))


class FloatMean(Program):
    """A running mean of losses in a Python float, by which the loss is divided."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.running = 1.0
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            model.running = 0.9 * model.running + 0.1 * loss.item()
            loss = loss / model.running
        return loss


class TensorMean(Program):
    """The same with a tensor that is not a buffer."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.running = torch.ones((), dtype=torch.float64)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            model.running = 0.9 * model.running + 0.1 * loss.detach()
            loss = loss / model.running
        return loss


class MemoryBank(Program):
    """A queue of features in a buffer, written at a place that an integer buffer points to (MoCo)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
            self.register_buffer("queue", torch.zeros(16, 4))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x).tanh()
            found = (h @ self.queue.clone().T).softmax(1) @ self.queue.clone()
            if self.training:
                rows = (self.place + torch.arange(len(x))) % 16
                self.queue[rows] = h.detach()
                self.place.add_(len(x)).remainder_(16)
            return self.outer(h + found)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class Codebook(Program):
    """Vector quantisation, codes as averages of what they stand for, straight-through gradients."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, 3), nn.Linear(3, 1)
            self.register_buffer("codes", torch.randn(4, 3))
            self.register_buffer("counts", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            nearest = torch.cdist(h, self.codes).argmin(1)
            if self.training:
                with torch.no_grad():
                    chosen = F.one_hot(nearest, 4).to(h)
                    self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                    self.codes.data.lerp_((chosen.T @ h) / self.counts[:, None], 0.1)
            code = self.codes[nearest]
            return self.outer(h + (code - h).detach()) + 0.1 * (h - code.detach()).square().mean()

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class ActivationsInList(Program):
    """A forward hook appends activations to a list, which the loss penalises and empties."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.kept = []
        model[1].register_forward_hook(lambda module, inputs, output: model.kept.append(output))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        model.kept.clear()
        loss = super().loss(model, batch)
        return loss + 0.1 * sum(h.square().mean() for h in model.kept)


class ActivationsInDict(Program):
    """Hooks that fill a dict by name, made by a closure, as in feature extractors."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.features = {}

        def keep(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
                model.features[name] = output

            return hook

        for name, module in model.named_children():
            module.register_forward_hook(keep(name))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + 0.01 * model.features["0"].abs().mean()


class LossHistory(Program):
    """All losses in a list on the model; the step looks back at them."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.history = []
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            model.history.append(loss.detach())
            loss = loss / torch.stack(model.history[-3:]).mean()
        return loss


class FloatWindow(Program):
    """A deque of the last losses as floats: what is far above their mean counts half."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.window = deque(maxlen=3)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            if model.window and loss.item() > sum(model.window) / len(model.window):
                loss = loss * 0.5
            model.window.append(float(loss.detach()))
        return loss


class CachedMask(Program):
    """A mask for each length of a batch in a dict on the model, made when it is first needed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.masks = head(), {}

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in self.masks:
                self.masks[len(x)] = torch.tril(x.new_ones(len(x), len(x))) / len(x)
            return self.head(self.masks[len(x)] @ x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class CachedPositions(Program):
    """`lru_cache` on a method that makes a table."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head()

        @lru_cache(maxsize=8)  # noqa: B019
        def table(self, rows: int) -> Tensor:
            return torch.linspace(0, 1, rows, dtype=torch.float64).unsqueeze(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.table(len(x)))

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class Locked(Program):
    """A lock on the model, held while a count is changed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.lock, self.calls = head(), threading.Lock(), 0

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                self.calls += self.training
            return self.head(x) / (1 + 0.01 * self.calls)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


@dataclass
class Meter:
    total: float = 0.0
    count: int = 0
    scale: dict[str, float] = field(default_factory=lambda: {"x": 1.0})


class MeterObject(Program):
    """An object of the user's own on the model, with a number, a count and a dict."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.meter = Meter()
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch) * model.meter.scale["x"]
        if model.training:
            model.meter.count += 1
            model.meter.scale["x"] = 1 / (1 + 0.1 * model.meter.count)
        return loss


class MeterOfTensors(Program):
    """The same object with a sum of losses, which are tensors."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.meter = Meter()
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            model.meter.total = model.meter.total + loss.detach()
            model.meter.count += 1
            loss = loss * model.meter.count / model.meter.total
        return loss


class HiddenState(Program):
    """The state of a recurrent network continues from batch to batch, detached."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.outer, self.state = nn.GRUCell(FEATURES, 4), nn.Linear(4, 1), None

        def forward(self, x: Tensor) -> Tensor:
            state = self.state.mean(0).expand(len(x), 4) if self.state is not None else None
            h = self.cell(x, state)
            if self.training:
                self.state = h.detach()
            return self.outer(h)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class ModelCopied(Program):
    """A copy of the model, made in the loss, is what the next step's is compared with."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head()
            self.old = [None]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            if model.old[0] is not None:
                loss = loss + 0.1 * F.mse_loss(model(batch[0]), model.old[0](batch[0]).detach())
            model.old[0] = copy.deepcopy(model.head).requires_grad_(False)
        return loss


class Late(nn.Module):
    """Counts its training steps, and in every sixth changes what it holds, which it divides by."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.head, self.held, self.steps = head(), held, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            if self.steps % 6 == 0:
                self.change()
        return self.head(x) / (1 + self.total())

    def change(self) -> None:
        self.held[0] += 1

    def total(self) -> float:
        return float(self.held[0])


class LateList(Program):
    """A list changes for the first time in the sixth step."""

    def net(self, config: Any) -> nn.Module:
        return Late([0])


class LateArray(Program):
    """A NumPy array changes for the first time in the sixth step."""

    def net(self, config: Any) -> nn.Module:
        return Late(np.zeros(2))


class SharedClock(Program):
    """Two modules share a list: the one counts in it, the other reads it."""

    class Reader(nn.Module):
        def __init__(self, clock: list[int]) -> None:
            super().__init__()
            self.inner, self.clock = nn.Linear(FEATURES, FEATURES), clock

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x)) / (1 + 0.05 * self.clock[0])

    def net(self, config: Any) -> nn.Module:
        clock = [0]
        return nn.Sequential(self.Reader(clock), Late(clock))
