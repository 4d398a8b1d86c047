"""Steps recorded as CUDA graphs compute what eager ones do; stand-ins record the graphs on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs_on_cpu import Device, graphs
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return graphs(monkeypatch)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def array_of(
    make: Callable[[], nn.Module] = net, kind: Callable[..., Optimizer] = torch.optim.Adam, count: int = 3
) -> tuple[ModelArray, FusedOptimizer]:
    models = []
    for b in range(count):
        torch.manual_seed(b)
        models.append(make().double())
    array = fuse(models, seeds=range(count))
    return array, fuse_optimizers([kind(m.parameters(), lr=0.01 * (b + 1)) for b, m in enumerate(models)], array)


def eager(array: ModelArray, optimizer: FusedOptimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    losses = array.map(loss, batch)
    losses.sum().backward()
    optimizer.step()
    return losses.detach()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 5, dtype=torch.float64, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def captured(array: ModelArray, optimizer: FusedOptimizer, batch: Any, **options: Any) -> CapturedStep:
    eager(array, optimizer, batch)
    return CapturedStep(array, optimizer, loss, batch, compiling=False, **options)


def test_each_step_records_on_a_stream_of_its_own_and_keeps_the_allocators_cache(device: Device) -> None:
    """Graphs of one stream would share the workspace of cuBLAS."""
    (batch,) = batches(1)
    default = device.current
    steps = [captured(*array_of(), batch) for _ in range(2)]
    first, second = (graph.stream for graph in device.graphs)
    assert first is not second
    for stream in (first, second):
        assert stream is not None
        assert stream.waited_for == [default], "what the current stream still does is done before the record"
    assert default.waited_for == [first, second]
    assert device.current is default
    assert device.log == []
    assert [step.fits(batch) for step in steps] == [True, True]


def test_a_record_that_finds_no_memory_is_repeated_with_what_the_allocator_keeps(device: Device) -> None:
    (batch,) = batches(1)
    device.fails.append(torch.OutOfMemoryError("none left"))
    array, optimizer = array_of()
    step = captured(array, optimizer, batch)
    assert device.log == ["end pool", "synchronize", "empty_cache"]
    assert device.current not in device.streams
    step(batch)
    assert device.replays == 1
