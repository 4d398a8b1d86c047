"""Steps recorded as CUDA graphs compute what eager ones do; stand-ins record the graphs on a CPU."""

import copy
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from graphs_on_cpu import Device, graphs
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from twins import class_loss, eager_step

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.backward import MicroBatches
from shoal.fuse.capture import CapturedStep
from shoal.fuse.cuda_graph import record_graph
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.randomness import seed_words
from shoal.fuse.step import TrainingStep


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return graphs(monkeypatch)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))


def array_of(
    make: Callable[[], nn.Module] = net, kind: Callable[..., Optimizer] = torch.optim.Adam, count: int = 3
) -> tuple[ModelArray, FusedOptimizer]:
    models = []
    for b in range(count):
        torch.manual_seed(b)
        models.append(make().double())
    array = fuse(models, seeds=range(count))
    return array, fuse_optimizers([kind(m.parameters(), lr=0.01 * (b + 1)) for b, m in enumerate(models)], array)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 5, dtype=torch.float64, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def captured(array: ModelArray, optimizer: FusedOptimizer, batch: Any, **options: Any) -> CapturedStep:
    eager_step(array, optimizer, batch)
    return CapturedStep(array, optimizer, class_loss, batch, compiling=False, **options)


RECORD = ["clear workspaces", "begin", "end", "clear workspaces"]
"""Graphs that shared a workspace of cuBLAS would write to it at the same time."""

FAILED_RECORD = [*RECORD[:3], "end pool", "synchronize", "begin", "end", "clear workspaces"]


def test_each_graph_has_its_own_workspaces_and_keeps_the_allocators_cache(device: Device) -> None:
    (batch,) = batches(1)
    default = device.current
    steps = [captured(*array_of(), batch) for _ in range(2)]
    streams = [graph.stream for graph in device.graphs]
    for stream in streams:
        assert stream is not None
        assert stream.waited_for == [default], "what the current stream still does is done before the record"
    assert default.waited_for == streams
    assert device.current is default
    assert device.log == 2 * RECORD
    assert [step.fits(batch) for step in steps] == [True, True]


def test_a_record_that_finds_no_memory_is_repeated_with_what_the_allocator_keeps(device: Device) -> None:
    (batch,) = batches(1)
    device.fails.append(torch.OutOfMemoryError("none left"))
    array, optimizer = array_of()
    step = captured(array, optimizer, batch)
    assert device.log == [*FAILED_RECORD, "empty_cache", *RECORD]
    assert device.current not in device.streams
    step(batch)
    assert device.replays == 1


def test_a_failed_record_holds_no_memory_once_the_allocator_gives_back_what_it_keeps(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """Stands for a tensor of the record."""

    held: list[Any] = []
    alive: list[bool] = []

    def run() -> None:
        local = Held()
        held.append(weakref.ref(local))
        if len(held) == 1:
            raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(held[0]() is not None))
    record_graph(run, torch.device("cpu"))
    assert alive == [False]


def test_without_memory_for_a_record_there_is_no_attempt_that_takes_more(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = batches(1)
    device.fails.append(torch.OutOfMemoryError("none left"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: device.fails.append(torch.OutOfMemoryError("nor now")))
    with pytest.raises(torch.OutOfMemoryError, match="nor now"):
        captured(*array_of(), batch)
    assert device.log == 2 * FAILED_RECORD


KINDS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True, weight_decay=lr),
    "NAdam, with a running product": torch.optim.NAdam,
    "SGD with momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
}


def same_state(array: ModelArray, optimizer: FusedOptimizer, twin: ModelArray, twins_optimizer: FusedOptimizer) -> None:
    for own, other in zip(array.members, twin.members, strict=True):
        torch.testing.assert_close(own.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(optimizer.members, twins_optimizer.members, strict=True):
        torch.testing.assert_close(mine.state_dict()["state"], theirs.state_dict()["state"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_graph_counts_updates_and_calls_by_itself(kind: Callable[..., Optimizer], device: Device) -> None:
    """With other rates, calls and seeds from step to step, and eager steps between."""
    given = batches(12)
    array, optimizer = array_of(kind=kind)
    twin, twins_optimizer = array_of(kind=kind)
    eager_step(twin, twins_optimizer, given[0])
    step = captured(array, optimizer, given[0])
    for number, batch in enumerate(given[1:], start=1):
        for both in (optimizer, twins_optimizer):
            both.members[1].param_groups[0]["lr"] = 0.05 / number
        for one in (array, twin):
            if number == 4:
                one.ticks = (100, 7, 9)
            if number == 7:
                one.seeds = (3, 2**70, -5)
        assert step.fits(batch)
        run = (lambda batch: eager_step(array, optimizer, batch)) if number in (6, 9) else step
        torch.testing.assert_close(run(batch), eager_step(twin, twins_optimizer, batch), rtol=1e-9, atol=0)
        assert array.ticks == twin.ticks
    assert device.replays == 9
    same_state(array, optimizer, twin, twins_optimizer)


def test_the_host_writes_numbers_of_calls_only_where_they_jump(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batches(6)
    array, optimizer = array_of()
    step = captured(array, optimizer, given[0])
    written: list[Any] = []
    monkeypatch.setattr("shoal.fuse.replay.seed_words", lambda seeds: written.append(array.ticks) or seed_words(seeds))
    for number, batch in enumerate(given):
        if number == 3:
            array.ticks = (50, 60, 70)
        step(batch)
    assert written == [(1, 1, 1), (50, 60, 70)]


def test_batches_are_accumulated_in_a_graph_with_the_keys_of_each(device: Device) -> None:
    first, second, third = (MicroBatches(tuple(batches(2)), (0.25, 0.75)) for _ in range(3))
    arrays = []
    for recorded in (False, True):
        array, optimizer = array_of()
        steps: Any = TrainingStep(array, optimizer, class_loss, ("eager",))
        losses = [steps(first)]
        if recorded:
            steps = CapturedStep(array, optimizer, class_loss, first, compiling=False)
        arrays.append((torch.stack([*losses, steps(second), steps(third)]), array, optimizer))
    (expected, twin, twins_optimizer), (found, array, optimizer) = arrays
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert device.replays == 2
    assert array.ticks == twin.ticks == (6, 6, 6)
    same_state(array, optimizer, twin, twins_optimizer)


@pytest.mark.parametrize("kind", [torch.optim.NAdam])
def test_a_replay_that_fails_counts_nothing(kind: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batches(4)
    array, optimizer = array_of(kind=kind)
    twin, twins_optimizer = array_of(kind=kind)
    eager_step(twin, twins_optimizer, given[0])
    step = captured(array, optimizer, given[0])
    for batch in given[1:]:
        with monkeypatch.context() as failing:
            failing.setattr(device.graphs[0], "replay", _raise)
            with pytest.raises(torch.OutOfMemoryError):
                step(batch)
        torch.testing.assert_close(step(batch), eager_step(twin, twins_optimizer, batch), rtol=1e-9, atol=0)
    same_state(array, optimizer, twin, twins_optimizer)


def _raise() -> None:
    raise torch.OutOfMemoryError("none left")


class Launches(TorchDispatchMode):
    """Names the functions that run on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_outside_of_the_graph_a_step_only_copies_its_batch_and_losses(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = batches(3)
    step = captured(*array_of(), first)
    assert step.fits(second)
    step(second)  # which writes the numbers of calls
    monkeypatch.setattr(device.graphs[0], "replay", lambda: None)
    with Launches() as launches:
        assert step.fits(third)
        step(third)
    assert [name for name in launches.names if name != "detach"] == ["empty_like", "copy_", "copy_", "copy_"]


def test_recording_runs_the_step_once_and_then_records_it(device: Device) -> None:
    runs = count()

    def noted(model: nn.Module, batch: Any) -> Tensor:
        next(runs)
        return class_loss(model, batch)

    (batch,) = batches(1)
    array, optimizer = array_of()
    eager_step(array, optimizer, batch)
    before = [member.state_dict() for member in copy.deepcopy(array.members)]
    CapturedStep(array, optimizer, noted, batch, compiling=False)
    assert next(runs) == 2, "the second run is the record"
    assert len(device.graphs) == 1
    torch.testing.assert_close([member.state_dict() for member in array.members], before, rtol=0, atol=0)


def test_a_step_that_cannot_be_recorded_as_it_runs_is_traced_first(device: Device) -> None:
    given = batches(2)
    array, optimizer = array_of()
    twin, twins_optimizer = array_of()
    eager_step(twin, twins_optimizer, given[0])
    eager_step(array, optimizer, given[0])
    device.fails.append(RuntimeError("operation not permitted when stream is capturing"))
    step = CapturedStep(array, optimizer, class_loss, given[0], compiling=False)
    assert device.log == [*FAILED_RECORD, *RECORD]
    assert step.fits(given[1])
    torch.testing.assert_close(step(given[1]), eager_step(twin, twins_optimizer, given[1]), rtol=1e-9, atol=0)
    assert device.replays == 1
    same_state(array, optimizer, twin, twins_optimizer)


def test_a_step_that_its_record_differs_from_is_refused(device: Device) -> None:
    """The iterator counts where no snapshot looks."""
    numbers = count(1)

    def counting(model: nn.Module, batch: Any) -> Tensor:
        return class_loss(model, batch) * next(numbers)

    (batch,) = batches(1)
    array, optimizer = array_of()
    eager_step(array, optimizer, batch)
    with pytest.raises(FusionError, match="two runs of it differ"):
        CapturedStep(array, optimizer, counting, batch, compiling=False)
    assert next(numbers) == 3, "one run and the record"
