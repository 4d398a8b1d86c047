"""A recorded step updates by torch's fused kernels; recorded and counted on a GPU that is not there."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pretended_gpu import Counts, PretendedGpu
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.step import TrainingStep

MEMBERS = 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "SGD, Nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD, dampening": partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "Adagrad": torch.optim.Adagrad,
}
BY_KERNELS = {"SGD", "SGD, Nesterov", "Adam", "AdamW", "AMSGrad"}


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as gpu:
        yield gpu


def loss(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y)


def setting(gpu: PretendedGpu, name: str, dtype: torch.dtype) -> tuple[ModelArray, FusedOptimizer, Any]:
    """An array with the optimizer of each member, and a batch."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
        ).to(dtype)
        for _ in range(MEMBERS)
    ]
    batch = (torch.randn(5, 2, 6, 6, dtype=dtype), torch.arange(5) % 3)
    gpu.claim(models, batch)
    array = fuse(models, seeds=range(MEMBERS))
    optimizers = [
        OPTIMIZERS[name](model.parameters(), lr=0.01 * (1 + b), weight_decay=0.01 * b) for b, model in enumerate(models)
    ]
    return array, fuse_optimizers(optimizers, array), batch


def set_rates(optimizer: FusedOptimizer, factor: float) -> None:
    for member in optimizer.members:
        for group in member.param_groups:
            group["lr"] *= factor


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_recorded_step_equals_an_eager_one(gpu: PretendedGpu, name: str, dtype: torch.dtype) -> None:
    """With learning rates that change between the steps."""
    (array, eager, batch), (recorded_array, recorded, _) = (setting(gpu, name, dtype) for _ in range(2))
    steps = [
        TrainingStep(array, eager, loss, ("eager",)) for array, eager in ((array, eager), (recorded_array, recorded))
    ]
    for step in steps:
        step(batch)
    graph = CapturedStep(recorded_array, recorded, loss, batch, compiling=False)
    for number in range(4):
        for optimizer in (eager, recorded):
            set_rates(optimizer, 0.5 + number)
        expected = steps[0](batch)
        with gpu.counting() as counts:
            assert graph.fits(batch)
            losses = graph(batch)
        assert counts.waits == {} or not number  # the first one tells the device the members' numbers of calls
        kernels = sum(number for name, number in counts.in_graphs.items() if name.startswith("_fused"))
        assert kernels == (MEMBERS if name in BY_KERNELS and dtype == torch.float32 else 0)
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    for (path, one, _), (_, two, _) in zip(array.stacked_tensors(), recorded_array.stacked_tensors(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, msg=path)


def test_a_setting_that_a_graph_has_as_a_number_is_noticed_and_no_constant_of_the_next(
    gpu: PretendedGpu,
) -> None:
    array, optimizer, batch = setting(gpu, "Adam", torch.float32)
    step = TrainingStep(array, optimizer, loss, ("eager",))
    step(batch)
    graph = CapturedStep(array, optimizer, loss, batch, compiling=False)
    set_rates(optimizer, 0.1)
    assert graph.fits(batch)
    optimizer.members[1].param_groups[0]["betas"] = (0.8, 0.99)
    assert not graph.fits(batch)
    step(batch)
    graph = CapturedStep(array, optimizer, loss, batch, compiling=False)
    with gpu.counting() as counts:
        graph(batch)
    assert not any(name.startswith("_fused") for name in counts.in_graphs)
    optimizer.members[1].param_groups[0]["betas"] = (0.7, 0.99)
    assert graph.fits(batch)


def test_once_such_a_setting_has_changed_the_step_is_recorded_with_all_settings_as_inputs(gpu: PretendedGpu) -> None:
    (array, optimizer, batch), (twin, twins_optimizer, _) = (setting(gpu, "Adam", torch.float32) for _ in range(2))
    launched = Counts()  # each launch takes a second
    step = TrainingStep(array, optimizer, loss, ("eager", "captured"), clock=lambda: launched.launches.total())
    eager = TrainingStep(twin, twins_optimizer, loss, ("eager",))
    modes, by_kernels = [], []
    for epoch in range(3):
        for each in (optimizer, twins_optimizer):
            each.members[1].param_groups[0]["betas"] = (0.9 - 0.05 * epoch, 0.999)
        for _ in range(25):
            with gpu.counting(launched), gpu.counting() as counts:
                losses = step(batch)
            torch.testing.assert_close(losses, eager(batch), rtol=1e-5, atol=1e-5)
            modes.append(step.last_mode)
        assert step.mode == "captured"
        by_kernels.append(any(name.startswith("_fused") for name in counts.in_graphs))
    assert by_kernels == [True, False, False]
    assert modes[25] == "eager", "the first step after the change"
    assert set(modes[50:]) == {"captured"}


class Mixed(nn.Module):
    """A layer in half precision before a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3, dtype=torch.bfloat16), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x.bfloat16()).float())
        return out


@pytest.mark.parametrize("name", ["Adam", "AdamW", "AMSGrad"])
def test_parameters_of_two_dtypes_are_updated_by_kernels_of_one_dtype_each(gpu: PretendedGpu, name: str) -> None:
    torch.manual_seed(0)
    models, batch = [Mixed() for _ in range(MEMBERS)], (torch.randn(5, 6), torch.arange(5) % 3)
    alone = copy.deepcopy(models)
    gpu.claim(models, batch)
    made, own = ([OPTIMIZERS[name](each.parameters(), lr=0.01) for each in those] for those in (models, alone))
    array = fuse(models, seeds=range(MEMBERS))
    optimizer = fuse_optimizers(made, array)
    with gpu.counting() as counts:
        TrainingStep(array, optimizer, loss, ("eager",))(batch)
    assert sum(number for name, number in counts.launches.items() if name.startswith("_fused")) == 2
    graph = CapturedStep(array, optimizer, loss, batch, compiling=False)
    with gpu.counting() as counts:
        graph(batch)
    assert sum(number for name, number in counts.in_graphs.items() if name.startswith("_fused")) == 2 * MEMBERS
    for model, each in zip(alone, own, strict=True):
        for _ in range(2):
            each.zero_grad()
            loss(model, (batch[0].cpu(), batch[1].cpu())).backward()
            each.step()
    for fused, model in zip(models, alone, strict=True):
        for one, two in zip(fused.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.cpu(), two, rtol=1e-2, atol=2e-3)
