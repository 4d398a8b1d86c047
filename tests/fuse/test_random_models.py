"""Random sequences of modules: outputs, gradients, buffers and steps equal those of each member alone."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from twins import build, close

from shoal.fuse.api import fuse, stack
from shoal.fuse.optim.fused import fuse_optimizers

SAMPLES = 4
LARGEST = 160
"""Numbers that a layer may give for a sample."""

Shape = tuple[int, ...]
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Layer:
    """A module that can follow on tensors [N, *shape]; drawn, it is told by its name."""

    name: str
    make: Make = field(repr=False)

    def after(self, shape: Shape, tokens: bool = False) -> Shape:
        """The shape of a sample that it gives."""
        x = torch.zeros(SAMPLES, *shape, dtype=torch.int64 if tokens else torch.float32)
        with torch.random.fork_rng(devices=[]):
            return tuple(self.make().eval()(x).shape[1:])


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Forked(nn.Module):
    """Branches, and what joins them."""

    def __init__(self, join: Callable[[list[Tensor]], Tensor], branches: list[nn.Module]) -> None:
        super().__init__()
        self.join = join
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return self.join([branch(x) for branch in self.branches])


def side_by_side(values: list[Tensor]) -> Tensor:
    return torch.cat(values, 1)


def summed(values: list[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])


class Recurrent(nn.Module):
    """What a recurrent layer gives at every step of [N, L, E]."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attending(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Affine(nn.Module):
    """Parameters of the model's own, and a buffer that counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.scale.tanh() + x.mean(-1, keepdim=True)


def rate() -> float:
    """A number of the member's own."""
    return 0.1 + 0.4 * torch.rand(()).item()


ANYWHERE: dict[str, Make] = {
    "Tanh": nn.Tanh,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Softplus": nn.Softplus,
    "LeakyReLU of own slope": lambda: nn.LeakyReLU(rate()),
    "ELU in place": lambda: nn.Sequential(nn.SiLU(), nn.ELU(inplace=True)),
    "PReLU": nn.PReLU,
    "Softmax": lambda: nn.Softmax(-1),
    "Identity": nn.Identity,
    "Flatten": nn.Flatten,
}
DROPPING: dict[str, Make] = {"Dropout": lambda: nn.Dropout(0.3), "Dropout of own rate": lambda: nn.Dropout(rate())}


def on_rows(c: int) -> Iterator[tuple[str, Make]]:
    yield "Linear", lambda: nn.Linear(c, 5)
    yield "Linear without bias", lambda: nn.Linear(c, 4, bias=False)
    yield "frozen Linear", lambda: nn.Linear(c, 6).requires_grad_(False)
    yield "weight-normed Linear", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(c, 3))
    yield "BatchNorm1d", lambda: nn.BatchNorm1d(c)
    yield "BatchNorm1d of sums", lambda: nn.BatchNorm1d(c, momentum=None)
    yield "GroupNorm", lambda: nn.GroupNorm(1, c)
    yield "Unflatten", lambda: nn.Unflatten(1, (1, c))
    if c % 4 == 0:
        yield "Unflatten to an image", lambda: nn.Unflatten(1, (c // 4, 2, 2))
    if c % 2 == 0:
        yield "GLU", lambda: nn.GLU()


def on_steps(length: int, width: int) -> Iterator[tuple[str, Make]]:
    """[N, L, E]: steps of E features, or L channels of signals."""
    yield "Linear", lambda: nn.Linear(width, 4)
    yield "GRU", lambda: Recurrent(nn.GRU(width, 3, batch_first=True))
    yield "LSTM", lambda: Recurrent(nn.LSTM(width, 2, 2, batch_first=True, bidirectional=True))
    yield "RNN", lambda: Recurrent(nn.RNN(width, 4, batch_first=True, bias=False))
    if width % 2 == 0:
        yield "attention", lambda: Attending(width, 2)
        yield (
            "TransformerEncoderLayer",
            lambda: nn.TransformerEncoderLayer(width, 2, 5, 0.0, "gelu", batch_first=True, norm_first=True),
        )
    yield "BatchNorm1d", lambda: nn.BatchNorm1d(length)
    if width > 1:
        yield "InstanceNorm1d", lambda: nn.InstanceNorm1d(length, affine=True, track_running_stats=True)
    yield "Conv1d", lambda: nn.Conv1d(length, 4, 3, padding=1)
    yield "Conv1d of groups", lambda: nn.Conv1d(length, 2 * length, 1, groups=length)
    yield "ConvTranspose1d", lambda: nn.ConvTranspose1d(length, 3, 2, stride=2)
    if width > 2:
        yield "dilated Conv1d", lambda: nn.Conv1d(length, 3, 2, stride=2, dilation=2)
        yield "MaxPool1d", lambda: nn.MaxPool1d(2)
        yield "AvgPool1d", lambda: nn.AvgPool1d(3, 2, 1)
        yield "ReflectionPad1d", lambda: nn.ReflectionPad1d(1)
    yield "AdaptiveAvgPool1d", lambda: nn.AdaptiveAvgPool1d(2)


def on_images(c: int, h: int, w: int) -> Iterator[tuple[str, Make]]:
    yield "Conv2d", lambda: nn.Conv2d(c, 4, 3, padding=1)
    yield "depthwise Conv2d", lambda: nn.Conv2d(c, c, 3, padding="same", groups=c)
    yield "circular Conv2d", lambda: nn.Conv2d(c, 2, (1, 3), padding=(0, 1), padding_mode="circular")
    yield "ConvTranspose2d", lambda: nn.ConvTranspose2d(c, 2, 2, bias=False)
    yield "BatchNorm2d", lambda: nn.BatchNorm2d(c)
    yield "BatchNorm2d of batches", lambda: nn.BatchNorm2d(c, track_running_stats=False)
    yield "LocalResponseNorm", lambda: nn.LocalResponseNorm(2)
    if h * w > 1:
        yield "InstanceNorm2d", lambda: nn.InstanceNorm2d(c)
    if min(h, w) > 1:
        yield "Conv2d with stride", lambda: nn.Conv2d(c, 3, 2, stride=2, bias=False)
        yield "MaxPool2d", lambda: nn.MaxPool2d(2, 1)
        yield "AvgPool2d", lambda: nn.AvgPool2d(2)
    yield "AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d((1, 2))
    yield "ZeroPad2d", lambda: nn.ZeroPad2d((0, 1, 1, 0))
    yield "Upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear")
    if c % 4 == 0:
        yield "PixelShuffle", lambda: nn.PixelShuffle(2)
    yield "rows", lambda: nn.Flatten(2)


def on_any(shape: Shape) -> Iterator[tuple[str, Make]]:
    yield from ANYWHERE.items()
    yield "LayerNorm", lambda: nn.LayerNorm(shape[-1:])
    yield "LayerNorm over all", lambda: nn.LayerNorm(shape, bias=False)
    yield "RMSNorm", lambda: nn.RMSNorm(shape[-1:])
    yield "Affine", lambda: Affine(shape[-1])
    if len(shape) > 1 and shape[0] % 2 == 0:
        yield "GroupNorm", lambda: nn.GroupNorm(2, shape[0])


def dropping(shape: Shape) -> Iterator[tuple[str, Make]]:
    yield from DROPPING.items()
    if len(shape) == 2:
        yield "Dropout1d", lambda: nn.Dropout1d(0.4)
        yield "GRU with dropout", lambda: Recurrent(nn.GRU(shape[1], 2, 2, batch_first=True, dropout=0.4))
        if shape[1] % 2 == 0:
            yield "TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(shape[1], 2, 4, 0.2, batch_first=True)
    if len(shape) == 3:
        yield "Dropout2d", lambda: nn.Dropout2d(0.4)


def candidates(shape: Shape, drops: bool) -> list[Layer]:
    of_rank = {1: on_rows, 2: on_steps, 3: on_images}[len(shape)](*shape)
    return [Layer(*pair) for pair in (*of_rank, *on_any(shape), *(dropping(shape) if drops else ()))]


@st.composite
def layers(draw: st.DrawFn, shape: Shape, drops: bool, most: int = 6) -> tuple[list[Layer], Shape]:
    """A chain of layers, and the shape that it gives."""
    chain: list[Layer] = []
    for _ in range(draw(st.integers(1, most))):
        layer = draw(st.sampled_from(candidates(shape, drops)))
        if most > 2 and draw(st.integers(0, 5)) == 0:
            layer = draw(blocks(shape, drops))
        after = layer.after(shape)
        if torch.Size(after).numel() <= LARGEST:
            chain.append(layer)
            shape = after
    return chain, shape


@st.composite
def blocks(draw: st.DrawFn, shape: Shape, drops: bool) -> Layer:
    """A chain around which its input is led, if its shape allows, or two, next to each other or summed."""
    chain, after = draw(layers(shape, drops, most=2))
    names = " > ".join(layer.name for layer in chain)
    make = lambda: nn.Sequential(*(layer.make() for layer in chain))  # noqa: E731
    if after == shape:
        return Layer(f"Residual({names})", lambda: Residual(make()))
    join = draw(st.sampled_from([side_by_side, summed]))
    return Layer(f"Forked({names}, {join.__name__})", lambda: Forked(join, [make(), make()]))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1, 2])),
    "cross entropy, smooth": lambda x: F.cross_entropy(x, torch.tensor([0, 2, -100, 1]), label_smoothing=0.1),
    "mse": lambda x: F.mse_loss(x, torch.linspace(-1, 1, 12, dtype=x.dtype).view(4, 3)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.eye(4, 3, dtype=x.dtype)),
}
EPS = 1e-3
"""Large, as Adam divides by the size of the gradient, which of a bias before a norm is rounding alone."""

OPTIMIZERS: dict[str, Callable[[nn.Module, int], Optimizer]] = {
    "SGD": lambda m, b: SGD(m.parameters(), lr=0.01 * (b + 1), momentum=0.5, weight_decay=0.01),
    "Adam": lambda m, b: Adam(m.parameters(), lr=0.001 * (b + 1), betas=(0.9 - 0.1 * b, 0.99), eps=EPS),
}


@dataclass(frozen=True)
class Case:
    """All that is drawn."""

    members: int
    shape: Shape
    tokens: bool
    layers: list[Layer]
    training: bool
    drops: bool
    own_inputs: bool
    loss: str
    optimizer: str

    def make(self) -> nn.Module:
        """One member: the layers, and a head for the loss."""
        chain = nn.Sequential(*(layer.make() for layer in self.layers), nn.Flatten())
        shape = self.shape
        for i, layer in enumerate(self.layers):
            shape = layer.after(shape, tokens=self.tokens and i == 0)
        return chain.append(nn.Linear(torch.Size(shape).numel(), 3)).train(self.training)


EMBEDDINGS = [
    Layer("Embedding", lambda: nn.Embedding(7, 4, padding_idx=2)),
    Layer("EmbeddingBag", lambda: nn.EmbeddingBag(7, 5, mode="sum")),
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.sampled_from([(4,), (3, 6), (3, 5, 4), (5,)]))
    tokens, drops = shape == (5,), draw(st.booleans())
    chain = [draw(st.sampled_from(EMBEDDINGS))] if tokens else []
    after = chain[0].after(shape, tokens=True) if chain else shape
    return Case(
        members=draw(st.integers(1, 5)),
        shape=shape,
        tokens=tokens,
        layers=chain + draw(layers(after, drops))[0],
        training=draw(st.booleans()),
        drops=drops,
        own_inputs=draw(st.booleans()),
        loss=draw(st.sampled_from(sorted(LOSSES))),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
    )


class Alone:
    """A member that trains by itself: plain PyTorch, or an array of one where masks of dropout are compared."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, b: int, case: Case) -> None:
        self.model = model
        self.array = fuse([model], seeds=[b]) if case.drops else None
        self.optimizer = fuse_optimizers([optimizer], self.array) if self.array is not None else optimizer

    def run(self, fn: Callable[[nn.Module, Tensor], list[Tensor]], x: Tensor) -> list[Tensor]:
        """The member's results."""
        if self.array is None:
            return fn(self.model, x)
        return [result[0] for result in self.array.map(fn, x)]

    def grads(self) -> dict[str, Tensor | None]:
        """By the names of parameters."""
        if self.array is None:
            return {name: p.grad for name, p in self.model.named_parameters()}
        return {name: None if p.grad is None else p.grad[0] for name, p, _ in self.array.stacked_tensors()}


def outputs_and_loss(loss: str, model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out, LOSSES[loss](out)]


def largest(tensors: Iterable[Tensor | None]) -> float:
    """The largest number, at least 1: what rounding is relative to."""
    return max([1.0, *(t.detach().abs().max().item() for t in tensors if t is not None)])


def near(actual: Tensor, expected: Tensor, scale: float, what: str) -> None:
    if expected.is_floating_point():
        actual, expected = actual / scale, expected / scale
    close(actual, expected, what)


@settings(
    max_examples=settings.default.max_examples * 2 // 5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases())
def test_a_stack_trains_like_its_members_alone(case: Case) -> None:
    models, twins = build(case.make, case.members), build(case.make, case.members)
    array = fuse(models, seeds=range(case.members))
    optimizer = fuse_optimizers([OPTIMIZERS[case.optimizer](m, b) for b, m in enumerate(models)], array)
    alone = [Alone(m, OPTIMIZERS[case.optimizer](m, b), b, case) for b, m in enumerate(twins)]
    fn = partial(outputs_and_loss, case.loss)
    torch.manual_seed(100)
    for step in range(2):
        size = (case.members if case.own_inputs else 1, SAMPLES, *case.shape)
        x = torch.randint(7, size) if case.tokens else torch.randn(size, dtype=torch.float64)
        results = array.map(fn, stack(x) if case.own_inputs else x[0])
        optimizer.zero_grad()
        results[1].sum().backward()
        grads = {name: p.grad for name, p, _ in array.stacked_tensors()}
        optimizer.step()
        for b, (solo, member) in enumerate(zip(alone, models, strict=True)):
            what = f"of {b} in step {step}"
            own = solo.run(fn, x[b] if case.own_inputs else x[0])
            for result, value in zip(results, own, strict=True):
                near(result[b], value, largest(own), f"result {what}")
            solo.optimizer.zero_grad()
            own[1].backward()
            own_grads = solo.grads()
            scale = largest([*own, *own_grads.values()])
            for name, grad in own_grads.items():
                assert (grad is None) == (grads[name] is None), f"gradient of {name} {what}"
                if grad is not None:
                    near(grads[name][b], grad, scale, f"gradient of {name} {what}")
            solo.optimizer.step()
            for name, value in solo.model.state_dict().items():
                near(member.state_dict()[name], value, scale, f"{name} {what}")
