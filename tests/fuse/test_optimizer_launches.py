"""On a GPU, an array's optimizer launches a kernel for many tensors of a member; counted on a GPU that is not there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.pretended_gpu import PretendedGpu
from torch import nn

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers

MEMBERS, LAYERS = 8, 10
MOST_LAUNCHES = 1.2
"""Per stacked parameter tensor."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "SGD, momentum": partial(torch.optim.SGD, momentum=0.9),
    "SGD, Nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
}


def models_of(layers: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).double() for _ in range(MEMBERS)]


def optimizers_of(name: str, models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [
        OPTIMIZERS[name](model.parameters(), lr=0.01 * (1 + b), weight_decay=0.1 * b) for b, model in enumerate(models)
    ]


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_launches_few_kernels_and_equals_the_members_own(name: str) -> None:
    models, alone = models_of(LAYERS), models_of(LAYERS)
    x = torch.randn(5, 3, dtype=torch.float64)
    own = optimizers_of(name, alone)
    with PretendedGpu() as gpu:
        gpu.claim(models, x.clone())
        on_gpu = x.clone()
        gpu.claim(on_gpu)
        array = fuse(models, seeds=range(MEMBERS))
        optimizer = fuse_optimizers(optimizers_of(name, models), array)
        for _ in range(3):
            optimizer.zero_grad()
            array.map(loss, on_gpu).sum().backward()
            with gpu.counting() as counts:
                optimizer.step()
        assert counts.waits == {}
    for model, each in zip(alone, own, strict=True):
        for _ in range(3):
            each.zero_grad()
            loss(model, x).backward()
            each.step()
    assert counts.launches.total() <= MOST_LAUNCHES * 2 * LAYERS
    for model, other in zip(models, alone, strict=True):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_counts_of_steps_are_float32_as_torchs_kernels_for_cuda_read_them() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        models = models_of(1)
        with PretendedGpu() as gpu:
            x = torch.randn(5, 3)
            gpu.claim(models, x)
            array = fuse(models, seeds=range(MEMBERS))
            optimizers = optimizers_of("Adam", models)
            optimizer = fuse_optimizers(optimizers, array)
            array.map(loss, x).sum().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    counts = [mine["step"] for each in optimizers for mine in each.state.values()]
    assert {(count.dtype, count.item()) for count in counts} == {(torch.float32, 1.0)}


def test_one_small_tensor_of_many_members_is_updated_at_once() -> None:
    """A kernel for each member would launch more than the functions for all members."""
    models = [nn.Linear(2, 1, bias=False) for _ in range(40)]
    with PretendedGpu() as gpu:
        x = torch.randn(5, 2)
        gpu.claim(models, x)
        array = fuse(models, seeds=range(len(models)))
        optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1 + b) for b, m in enumerate(models)], array)
        array.map(loss, x).sum().backward()
        with gpu.counting() as counts:
            optimizer.step()
    assert counts.launches.total() < len(models)
    assert not any(name.startswith("_fused") for name in counts.launches)
