"""Programs that draw: from torch, Python, NumPy or generators of their own, in the model, the loss or the step."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus_base import CLASSES, FEATURES, Labels, Program
from torch import Tensor, nn


class ManualDropout(Program):
    """Dropout by hand with torch.rand."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[1](self[0](x))
            if self.training:
                h = h * (torch.rand(h.shape, dtype=h.dtype) > 0.3) / 0.7
            return self[2](h)

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


class Gumbel(Labels):
    """A Gumbel softmax in the middle of the model, as it trains."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return self.outer(F.gumbel_softmax(h, tau=0.7) if self.training else h.softmax(1))

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class StochasticDepth(Program):
    """Blocks are skipped by random.random()."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.outer = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3)), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if not self.training or random.random() > 0.4:
                    x = x + block(x).tanh()
            return self.outer(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class MixupNumpy(Labels):
    """Mixup with numpy's beta distribution and torch's permutation, the classic code."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if not model.training:
            return super().loss(model, batch)
        share = np.random.beta(0.4, 0.4)
        order = torch.randperm(len(x))
        logits = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


class MixupDistribution(Labels):
    """The same with torch.distributions."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if not model.training:
            return super().loss(model, batch)
        share = torch.distributions.Beta(0.4, 0.4).sample().double()
        return F.cross_entropy(model(share * x + (1 - share) * x.flip(0)), y)


class CutOut(Program):
    """Zeroes a random range of columns in place, in the batch itself."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if model.training:
            begin = random.randrange(FEATURES)
            x[:, begin : begin + 2] = 0
        return F.mse_loss(model(x), y)


class Variational(Program):
    """Reparameterised noise with randn_like, and a Kullback-Leibler term."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_scale, self.outer = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Any:
            mean, log_scale = self.mean(x), self.log_scale(x)
            z = mean + log_scale.exp() * torch.randn_like(mean)
            return self.outer(z), (mean.square() + (2 * log_scale).exp() - 2 * log_scale - 1).sum(1).mean()

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        y, divergence = model(batch[0])
        return F.mse_loss(y, batch[1]) + 0.01 * divergence

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {}


class OwnGenerator(Program):
    """Noise from a torch.Generator on the model."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 1)
            self.numbers = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x + 0.1 * torch.randn(x.shape, generator=self.numbers, dtype=x.dtype)
            return self.head(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class NumpyGenerator(Program):
    """Noise from numpy's default_rng on the model."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 1)
            self.numbers = np.random.default_rng(3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x + torch.from_numpy(self.numbers.normal(size=x.shape)) * 0.1
            return self.head(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class ShuffledChannels(Program):
    """A permutation of channels at each forward pass, by random.sample."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[0](x)
            if self.training:
                h = h[:, random.sample(range(5), 5)]
            return self[2](self[1](h))

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


class NegativeSampling(Labels):
    """Classes to push away are drawn with torch.multinomial and torch.randint."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        scores = model(x)
        if not model.training:
            return F.cross_entropy(scores, y)
        wrong = torch.multinomial(torch.ones(CLASSES), len(x), replacement=True)
        again = torch.randint(0, CLASSES, (len(x),))
        rows = torch.arange(len(x))
        return F.softplus(scores[rows, wrong] + scores[rows, again] - 2 * scores[rows, y]).mean()


class Reinforce(Labels):
    """A policy gradient: actions are sampled from the model's own distribution."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        policy = torch.distributions.Categorical(logits=model(x))
        action = policy.sample()
        return -(policy.log_prob(action) * (action == y).double()).mean() - 0.01 * policy.entropy().mean()
