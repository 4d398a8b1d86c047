"""Parameters in half precision are updated as by torch's plain loop, alone and in an array."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.unfused_step import UnfusedStep

CASES: dict[str, tuple[Callable[..., Optimizer], torch.dtype]] = {
    "SGD, bf16": (torch.optim.SGD, torch.bfloat16),
    "SGD, f16": (torch.optim.SGD, torch.float16),
    "SGD with momentum, bf16": (partial(torch.optim.SGD, momentum=0.9), torch.bfloat16),
    "Adam, bf16": (torch.optim.Adam, torch.bfloat16),  # in f16 the plain loop divides by zero
}


def layer(seed: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(40, 5).to(dtype)


def backward(model: nn.Linear) -> None:
    x = torch.linspace(-1, 1, 80).view(2, 40).to(model.weight.dtype)
    model.zero_grad()
    model(x).square().sum().backward()


@pytest.mark.parametrize(("make", "dtype"), CASES.values(), ids=CASES)
def test_updates_are_those_of_the_plain_loop(make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    """Torch's fused kernel of SGD leaves them unchanged on a CPU, but for the last few."""
    expected, alone, *models = (layer(0, dtype) for _ in range(4))
    begun = expected.weight.detach().clone()
    by_loop = make(expected.parameters(), lr=0.01, foreach=False, fused=False)
    by_itself = UnfusedStep(make(alone.parameters(), lr=0.01))
    array = fuse(models)
    fused = fuse_optimizers([make(model.parameters(), lr=0.01) for model in models], array)
    for _ in range(3):
        backward(expected)
        by_loop.step()
        backward(alone)
        by_itself()
        fused.zero_grad()
        array.map(
            lambda model, x: model(x).square().sum(), torch.linspace(-1, 1, 80).view(2, 40).to(dtype)
        ).sum().backward()
        fused.step()
    moved = (expected.weight - begun).abs().max()
    for model in (alone, *models):
        assert (model.weight - expected.weight).abs().max() < 0.2 * moved
