"""Buffers that are used and then replaced: the pass backward needs them as they were."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from shoal.fuse.making import fuse
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


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def asking(model: Recurrent, x: Tensor) -> Tensor:
    """Makes members of an array run one by one, for they do not agree."""
    return loss(model, x) * (2 if model.across.bias[0] > 0 else 3)


@pytest.mark.parametrize("watched", [True, False], ids=["looked at", "left alone"])
@pytest.mark.parametrize(
    ("members", "way", "fn"), [(1, "serial", loss), (3, "serial", loss), (1, "eager", loss), (3, "eager", asking)]
)
def test_gradients_are_of_what_was_used(members: int, way: str, fn: object, watched: bool) -> None:
    torch.manual_seed(0)
    alone = [Recurrent().double() for _ in range(members)]
    for sign, model in enumerate(alone):
        nn.init.constant_(model.across.bias, (-1.0) ** sign)
    fused = copy.deepcopy(alone)
    array = fuse(fused, list(range(members)))
    array.watched = watched
    optimizers = [SGD(model.parameters(), 0.1, momentum=0.9) for model in fused]
    step = TrainingStep(array, fuse_optimizers(optimizers, array), fn, (way,))  # type: ignore[arg-type]
    plain = [SGD(model.parameters(), 0.1, momentum=0.9) for model in alone]
    for x in X:
        step(x)
        for model, optimizer in zip(alone, plain, strict=True):
            optimizer.zero_grad()
            fn(model, x).backward()  # type: ignore[operator]
            optimizer.step()
    for mine, own in zip(fused, alone, strict=True):
        for name, value in own.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)
