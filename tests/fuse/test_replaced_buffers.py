"""Buffers that a forward pass uses and then replaces: the backward pass uses the old buffers."""

import copy
from collections import deque

import pytest
import torch
from compare_with_plain import CompareWithPlain
from torch import Tensor, nn
from torch.optim import SGD

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep

X = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
"""Of five steps."""


class Recurrent(nn.Module):
    """Its state is a buffer, of which the gradient of `across` is made."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.across = nn.Linear(4, 3), nn.Linear(3, 3)
        self.register_buffer("state", torch.ones(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        new = (self.inwards(x) + self.across(self.state)).tanh()
        self.state = new.detach().mean(0, keepdim=True)
        return new


class Ring(nn.Module):
    """Its last two outputs are buffers, of which one becomes the other."""

    newest: Tensor
    older: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(4, 3)
        self.register_buffer("newest", torch.zeros(3))
        self.register_buffer("older", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inwards(x) + 0.3 * self.newest - 0.2 * self.older
        self.older = self.newest
        self.newest = out.detach().mean(0)
        return out.tanh()


class Swap(Ring):
    """Its buffers change places, and one is turned round."""

    def forward(self, x: Tensor) -> Tensor:
        self.newest, self.older = self.older, self.newest
        self.square = self.square.T
        return self.inwards(x) + self.newest + 2 * self.older + self.square[0]

    def __init__(self) -> None:
        super().__init__()
        self.newest += 1
        self.older += torch.arange(3)
        self.register_buffer("square", torch.arange(9.0).reshape(3, 3) / 9)


class Keeps(Ring):
    """Has what its buffer was in an attribute, a list, a deque and a dict as well."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Tensor] = []
        self.last: deque[Tensor] = deque(maxlen=2)
        self.named: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inwards(x)
        for tensor in (*self.past[-1:], *self.last, *self.named.values(), getattr(self, "before", self.newest)):
            out = out + 0.1 * tensor
        self.before = self.newest
        self.past.append(self.newest)
        self.last.append(self.newest)
        self.named["last"] = self.newest
        self.newest = out.detach().mean(0)
        return out.tanh()


class SwapParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return x * self.a + 2 * self.b


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


@pytest.mark.parametrize("members", [1, 3])
def test_gradients_are_of_what_was_used(members: int) -> None:
    torch.manual_seed(0)
    alone = [Recurrent().double() for _ in range(members)]
    for sign, model in enumerate(alone):
        nn.init.constant_(model.across.bias, (-1.0) ** sign)
    assert len(list(CompareWithPlain(alone, loss, "plain", momentum=0.9).train(X))) == len(X)


@pytest.mark.parametrize("mode", ["plain", "eager"])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("make", [Ring, Swap, Keeps])
def test_buffers_that_change_places(make: type[nn.Module], members: int, mode: str) -> None:
    torch.manual_seed(0)
    both = CompareWithPlain([make().double() for _ in range(members)], loss, mode)
    for x in both.train(X):
        with torch.no_grad():
            measured = both.array.map(loss, x)
            wanted = torch.stack([loss(model, x) for model in both.alone])
        torch.testing.assert_close(measured, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("members", [1, 3])
def test_parameters_that_change_places_are_refused(members: int) -> None:
    models = [SwapParameters() for _ in range(members)]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    array = fuse(models)
    optimizer = fuse_optimizers([SGD(model.parameters(), 0.1) for model in models], array)
    step = TrainingStep(array, optimizer, loss, ("plain",))
    with pytest.raises(FusionError, match="'a' is a parameter, and a function has put another tensor in its place"):
        step(X[0].float())
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
