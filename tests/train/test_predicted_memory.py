"""The memory of an array, as it is predicted before it starts, against what its tensors take in training."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shoal
from shoal.core.array import Array, FusionKey, Member
from shoal.core.trial import Trial
from shoal.fuse.autotune import forced_lowerings
from shoal.fuse.capture_decision import CaptureDecision
from shoal.train.bases import bases_of
from shoal.train.data.datasets import DataSets
from shoal.train.make_stepper import make_stepper
from shoal.train.memory import MemoryMeter, MemoryTracker, fixed_bytes
from shoal.train.profile import measure
from shoal.train.step_settings import StepPlan
from shoal.train.trial_runtime import sort_by_optimizer
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
WIDTH, SAMPLES, MEMBERS = 64, 256, 4

T = TypeVar("T")


class TensorMeter(MemoryMeter):
    """Counts the bytes of tensors on a CPU, and nothing else of the process."""

    def used(self) -> int:
        """Bytes of all live tensors."""
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        found += [each.grad for each in found if each.is_leaf and each.grad is not None]
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())

    def during(self, step: Callable[[], T]) -> tuple[T, int]:
        """The result of a step, and the bytes that it adds at its peak through torch's allocator."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
            result = step()
        events: Any = record.profiler
        changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        return result, max(accumulate((event.nbytes() for event in changes), initial=0))


class Block(nn.Module):
    """A frozen layer and the place of an adapter, computed again in the backward pass if `checkpointing`."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.down: nn.Module = nn.Identity()
        self.up: nn.Module = nn.Identity()

    def adapted(self, x: Tensor) -> Tensor:
        """The layer's result."""
        return x + torch.tanh(self.frozen(x) + self.up(self.down(x))).sin()

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpointing:
            return self.adapted(x)
        found: Tensor = checkpoint(self.adapted, x, use_reentrant=False)
        return found


class Adapters(shoal.Task):
    """Adapters of several ranks on one base."""

    def __init__(self, checkpointing: bool) -> None:
        self.checkpointing = checkpointing

    def data(self, config: Any) -> Any:
        rows = TensorDataset(torch.randn(2 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0)))
        return rows, rows

    def base(self, config: Any) -> nn.Module:
        return nn.Sequential(*(Block(self.checkpointing) for _ in range(4)))

    def model(self, config: Any, base: Any) -> nn.Module:
        for block in base:
            block.down = nn.Linear(WIDTH, config["r"], bias=False)
            block.up = nn.Linear(config["r"], WIDTH, bias=False)
        return base  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def meter() -> Iterator[TensorMeter]:
    """Counts the tensors that live from now on."""
    gc.collect()
    gc.freeze()
    yield TensorMeter(CPU)
    gc.unfreeze()


def test_the_meter_counts_what_lives_at_once(meter: TensorMeter) -> None:
    held = torch.zeros(1000)

    def step() -> None:
        first = held + 1
        del first
        second = held + 1
        torch.cat([second, second])

    assert meter.during(step)[1] == 4 * (1000 + 2000)


@pytest.mark.parametrize(
    ("ranks", "checkpointing", "seconds"),
    [((8,) * 4, False, 0.0), ((2, 8, 32, 6), True, inf)],
    ids=["by a lone member", "by an array of mixed ranks, checkpointed"],
)
def test_the_prediction_is_within_a_tenth(
    ranks: tuple[int, ...],
    checkpointing: bool,
    seconds: float,
    meter: TensorMeter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.train.profile._step_seconds", _untimed)
    monkeypatch.setattr("shoal.train.fused_stepper.modes_to_try", lambda profile, members: ("eager",))
    task = Adapters(checkpointing)
    trials = (Trial(b, {"r": rank, "batch_size": SAMPLES}, b, 7) for b, rank in enumerate(ranks))
    members = tuple(Member(trial, 0, 2) for trial in trials)
    config = members[0].trial.config
    with forced_lowerings({"padded linear": "padded"}):
        state = WorkerState(task, DataSets(task, CPU), TrialCache(), CPU, tmp_path)
        bases_of(task, CPU).load(config)
        train, valid = state.sets.of(config)
        before = meter.used()
        array = Array(FusionKey("", "", SAMPLES), members, expected_epochs=0)
        profile = measure(state, array, 1 << 60, seconds, meter=meter)
        predicted = profile.base_memory + MEMBERS * profile.member_memory - before
        state.built.drop()
        gc.collect()
        before = meter.used()
        runtimes = sort_by_optimizer([state.build(each) for each in members])
        stepper = make_stepper(task, runtimes, compiling=CaptureDecision(None, MEMBERS, steps=0))
        batch = next(StepPlan.of(task, config, train, valid).step_batches(0, 0, 7))
        peaks = []
        for tick in range(3):
            held = meter.used() - before
            _, added = meter.during(partial(stepper.train_step, [batch] * MEMBERS, [tick] * MEMBERS))
            peaks.append(held + added)
    assert predicted == pytest.approx(max(peaks), rel=0.1)
    assert max(profile.step_seconds) == (MEMBERS if seconds else 1)


def _untimed(stepper: Any, batches: Any, tick: int) -> float:
    stepper.train_step(batches, [tick] * len(batches))
    return 0.5 * len(batches)  # few such steps are enough


@pytest.mark.parametrize(
    ("lone", "array", "members", "fixed"),
    [(7, 7, 1, 0), (10 + 3, 10 + 4 * 3, 4, 10), (3, 4 * 3, 4, 0), (3, 4 * 4, 4, 0)],
    ids=["no array", "a fixed part", "none", "an array takes more"],
)
def test_bytes_that_do_not_grow_with_members(lone: int, array: int, members: int, fixed: int) -> None:
    assert fixed_bytes(lone, array, members) == fixed


def test_members_of_one_key_in_several_arrays_are_counted_together() -> None:
    tracker, key, other = MemoryTracker("job", CPU), FusionKey("A", "data", 4), FusionKey("B", "data", 4)
    tracker.sample([(key, 1), (other, 2), (key, 3)])
    tracker.sample([(key, 2), (other, 3)])
    peak = tracker.new_peak()
    assert peak is not None
    assert peak.members == {key: 4, other: 3}
