"""Small programs in float64 in which faults of Shoal show, each with rules, optimizers or state that others lack."""

from typing import Any

import corpus_base
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEATURES, CLASSES = corpus_base.FEATURES, corpus_base.CLASSES
HIDDEN, WORDS = 4, 7


class Program(corpus_base.Program):
    """Regression with momentum on 28 samples: four steps an epoch, the last of four samples. Trials differ in `lr`."""

    modes: Any = ("eager", "plain")
    epochs = 6

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1))

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        lr = config["lr"]
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5 + lr, weight_decay=lr, nesterov=True)


class Labels(Program):
    """Classes instead of numbers, with a smoothed loss that leaves out the last class, and AdamW."""

    def data(self, config: Any) -> Any:
        tables = (rows.tensors for rows in super().data(config))
        return tuple(TensorDataset(x, (y[:, 0] > -0.5).long() + (y[:, 0] > 0.5).long()) for x, y in tables)

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        lr = config["lr"]
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.8 + lr, 0.95), weight_decay=lr, amsgrad=True)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        smoothing = 0.1 if model.training else 0.0
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing, ignore_index=CLASSES - 1)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


class Convolution(Labels):
    """Two convolutions, one of them with groups, batch norm and pooling."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.unsqueeze(1) * x.unsqueeze(2)[:, :, :1])

    def net(self, config: Any) -> nn.Module:
        return self.Net(
            nn.Conv1d(FEATURES, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.Tanh(),
            nn.MaxPool1d(2),
            nn.Conv1d(4, 4, 3, padding=1, groups=2),
            nn.Flatten(),
            nn.Linear(12, CLASSES),
        )


class Attention(Labels):
    """Words with a padding word, causal attention, and layer norm."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, HIDDEN, padding_idx=0)
            self.given, self.norm = nn.Linear(HIDDEN, 3 * HIDDEN), nn.LayerNorm(HIDDEN)
            self.outer = nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.words(x)
            q, k, v = self.given(h).chunk(3, -1)
            h = self.norm(h + F.scaled_dot_product_attention(q, k, v, is_causal=True))
            return self.outer(h.mean(1))

    def data(self, config: Any) -> Any:
        rows = (each.tensors for each in super().data(config))
        return tuple(TensorDataset((x.abs() * 3).long() % WORDS, y) for x, y in rows)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class Recurrent(Program):
    """An LSTM over the features, with RMSprop."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.outer = nn.LSTM(1, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.cell(x.unsqueeze(-1))[0][:, -1])

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.RMSprop(model.parameters(), lr=0.1 * config["lr"], alpha=0.8 + config["lr"], momentum=0.5)


class Dropout(Program):
    """Dropout twice, whose rate differs between trials, with Adam."""

    def net(self, config: Any) -> nn.Module:
        inner = nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Dropout(0.3), nn.Linear(HIDDEN, HIDDEN)
        return nn.Sequential(*inner, nn.Dropout(0.3), nn.Linear(HIDDEN, 1))

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(0.8, 0.95), weight_decay=config["lr"])


class Clipped(Program):
    """Gradients are clipped at a norm, which differs between trials."""

    def clip_norm(self, config: Any) -> float:
        return 2 * float(config["lr"])


class Accumulated(Program):
    """Two batches a step."""

    def accumulate(self, config: Any) -> int:
        return 2


class OwnStep(Program):
    """A step of its own with two optimizers."""

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        inner = torch.optim.SGD(model[0].parameters(), lr=config["lr"], momentum=0.5)
        return inner, torch.optim.Adam([*model[2].parameters(), *model[3].parameters()], lr=config["lr"])

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        for one in optimizer:
            one.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        for one in optimizer:
            one.step()
        return loss


class State(Program):
    """A buffer that is replaced, one that is written in place, a counter and a tensor on the model."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.seen = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1), 0
            self.register_buffer("mean", torch.zeros(FEATURES))
            self.register_buffer("scale", torch.ones(HIDDEN))
            self.last: Any = torch.zeros(HIDDEN, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x - self.mean)
            if self.training:
                self.seen += 1
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0) * self.inner.weight.detach().sum()
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(h.abs().mean(0), alpha=0.1)
                self.last = 0.5 * self.last + 0.5 * h.detach().mean(0)
            return self.outer(h / self.scale - self.last) / (1 + 0.1 * self.seen)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class Buffers(State):
    """The buffers alone, in a graph."""

    modes = ("eager", "captured")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)
            self.register_buffer("scale", torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            if self.training:
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(h.abs().mean(0), alpha=0.1)
            return self.outer(h / self.scale)


class Captured(Dropout):
    """Dropout, clipping and a learning rate that changes with each step, in a graph."""

    modes = ("eager", "captured")
    scheduler_interval = "step"

    def clip_norm(self, config: Any) -> float:
        return 2 * float(config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class Scheduled(Program):
    """A learning rate that changes with each step."""

    scheduler_interval = "step"

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8 + config["lr"])


class Leaves(Labels):
    """A trial ends in its second epoch, and the others go on as a smaller array."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("left", torch.tensor(5.0 if config["lr"] < 0.04 else 1e3, dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            model.left -= 1
        return super().loss(model, batch) + 0 * model.left.sqrt().detach()


class Evaluated(Labels):
    """Metrics of a model that is switched, and of all outputs of the validation set."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: Tensor, bare: bool = False) -> Tensor:
            h = self.inner(x)
            return self.outer(h if bare else h.tanh())

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"bare": F.cross_entropy(model(batch[0], bare=True), batch[1])}

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def evaluate(self, outputs: Any, config: Any) -> Any:
        return {"spread": float(torch.cat(outputs).std())}


class Noisy(Program):
    """Noise in validation, too."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


class Long(Program):
    """Eighty-four steps."""

    epochs = 21
