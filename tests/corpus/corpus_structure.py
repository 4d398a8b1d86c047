"""Programs whose models are put together in odd ways: ties, parametrizations, lazy and late parameters, adapters."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from corpus_base import CLASSES, FEATURES, Labels, Program, Words
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class TiedEmbedding(Words):
    """Input and output share one matrix."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 4)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x).mean(1).tanh())

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class TiedTransposed(Program):
    """An autoencoder that decodes by the transposed weights of its encoder."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.outer = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(F.linear(self.encode(x).tanh(), self.encode.weight.t()))

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrized(Program):
    """nn.utils.parametrize keeps a matrix symmetric."""

    def net(self, config: Any) -> nn.Module:
        inner = nn.Linear(FEATURES, FEATURES)
        parametrize.register_parametrization(inner, "weight", Symmetric())
        return nn.Sequential(inner, nn.Tanh(), nn.Linear(FEATURES, 1))


class SpectralNorm(Program):
    """Spectral norm, with power iterations in buffers."""

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, 5)), nn.Tanh(), nn.Linear(5, 1))


class OldSpectralNorm(Program):
    """The older spectral norm, which is a hook."""

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(FEATURES, 5)), nn.Tanh(), nn.Linear(5, 1))


class WeightNorm(Program):
    """Weight norm as a parametrization."""

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, 5)), nn.Tanh(), nn.Linear(5, 1))


class Lazy(Program):
    """Layers that learn the size of their input by the first batch, before the optimizer is made."""

    def model(self, config: Any) -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1)).double()
        model(torch.ones(4, FEATURES, dtype=torch.float64))
        return model


class LateParameter(Program):
    """A parameter that the first forward pass creates, and that no optimizer trains."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.shift = nn.Linear(FEATURES, 1), None

        def forward(self, x: Tensor) -> Tensor:
            if self.shift is None:
                self.shift = nn.Parameter(x.new_full((FEATURES,), 0.5))
            return self.head(x + self.shift)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class LatePartOfOptimizer(Program):
    """A layer is added in the third step, and given to the optimizer then (progressive growing)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.calls = nn.Sequential(nn.Linear(FEATURES, 1)), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) + (self.more(x.square()) if hasattr(self, "more") else 0)

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        model.calls += 1
        if model.calls == 3:
            model.more = nn.Linear(FEATURES, 1).double()
            optimizer.add_param_group({"params": model.more.parameters()})
        return super().step(model, batch, optimizer)


class LowRank(Program):
    """LoRA by hand: a frozen base, two trained matrices beside it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(FEATURES, 5).requires_grad_(False)
            self.down, self.up = nn.Parameter(0.3 * torch.randn(2, FEATURES)), nn.Parameter(torch.zeros(5, 2))
            self.outer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer((self.base(x) + x @ self.down.T @ self.up.T).tanh())

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=config["lr"])


class SharedBackbone(Program):
    """A frozen backbone that the task holds, merged with the weights by torch.func.functional_call."""

    def __init__(self) -> None:
        self.backbone = nn.Linear(FEATURES, 5).double().requires_grad_(False)
        with torch.no_grad():
            self.backbone.weight.copy_(torch.linspace(-1, 1, 30).view(5, 6))
            self.backbone.bias.zero_()

    class Net(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.shift, self.outer = base, nn.Parameter(torch.zeros(5, FEATURES)), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            weights = {"weight": self.base.weight + self.shift, "bias": self.base.bias}
            return self.outer(torch.func.functional_call(self.base, weights, (x,)).tanh())

    def net(self, config: Any) -> nn.Module:
        return self.Net(self.backbone)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class DataclassOutput(Labels):
    """A model that returns a dataclass."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Output:
            h = self.inner(x).tanh()
            return Output(self.outer(h), h)

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return F.cross_entropy(output.logits, batch[1]) + 0.01 * output.hidden.square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": (model(batch[0]).logits.argmax(1) == batch[1]).double().mean()}


class EarlyExit(Program):
    """A generator yields the results of exits; the loss takes as many as it likes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
            self.exits = nn.ModuleList(nn.Linear(FEATURES, 1) for _ in range(3))

        def results(self, x: Tensor) -> Any:
            for block, out in zip(self.blocks, self.exits, strict=True):
                x = block(x).tanh()
                yield out(x)

        def forward(self, x: Tensor) -> Tensor:
            return list(self.results(x))[-1]

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return sum(F.mse_loss(y, batch[1]) for y in model.results(batch[0])) / 3


class ClosureOverList(Program):
    """`forward` is a function that closes over a list of the model's layers."""

    def net(self, config: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, 1))
        layers = list(model)

        def forward(x: Tensor) -> Tensor:
            for layer in layers[:-1]:
                x = layer(x).tanh()
            return layers[-1](x)

        model.forward = forward
        return model


class SparseEmbedding(Words):
    """An embedding with sparse gradients, as in recommender systems."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.outer = nn.EmbeddingBag(7, 4, mode="sum", sparse=True), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.words(x))

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])


class Spectrum(Program):
    """Complex numbers: a filter of complex weights between two Fourier transforms."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.outer = nn.Parameter(torch.randn(4, 2) * 0.5), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
            return self.outer(torch.fft.irfft(spectrum, n=FEATURES))

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class Scripted(Program):
    """A submodule of TorchScript."""

    def net(self, config: Any) -> nn.Module:
        inner = torch.jit.script(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh()))
        return nn.Sequential(inner, nn.Linear(5, 1))


class Compiled(Program):
    """A submodule that is compiled."""

    def net(self, config: Any) -> nn.Module:
        inner = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh())
        return nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(5, 1))


class CopiedInForward(Program):
    """A block is copied in the forward pass, to be run with noise-free weights beside the block itself."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            still = copy.deepcopy(self.block).requires_grad_(False)
            return self.outer(self.block(x).tanh() + still(x))

    def net(self, config: Any) -> nn.Module:
        return self.Net()
