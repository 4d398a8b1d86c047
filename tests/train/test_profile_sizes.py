"""The array sizes that a profile job measures, depending on the amount of waiting work."""

from itertools import chain, repeat
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.trial import Trial
from shoal.task import Task
from shoal.train.data.datasets import DataSets
from shoal.train.memory import MemoryMeter
from shoal.train.profile import (
    FREE_SECONDS,
    MEASURING_SHARE,
    STEPS_PER_MEMBER,
    _Iteration,
    _utilisation,
    measure,
)
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
EPOCH_STEPS = 2


def state_of(task: Task) -> WorkerState:
    """Return the state of a process that has trained nothing yet."""
    return WorkerState(task, DataSets(task, CPU), TrialCache(), CPU, Path())


class Small(Task):
    """A linear model."""

    def data(self, config: Any) -> Any:
        x = torch.randn(4 * EPOCH_STEPS, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x), TensorDataset(x)

    def model(self, config: Any) -> nn.Module:
        return nn.Linear(3, 1)

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


def milliseconds(stepper: Any, batches: Any, tick: int) -> float:
    """Take a step on a machine where measuring four members exceeds the free time."""
    stepper.train_step(batches, [tick] * len(batches))
    return 0.003 * len(batches)


def enough(members: int) -> float:
    """Return the number of waiting epochs for which these members, and all smaller sizes, are measured."""
    return sum(size * STEPS_PER_MEMBER for size in (4, members)) / (MEASURING_SHARE["cpu"] * EPOCH_STEPS)


@pytest.mark.parametrize(
    ("expected_epochs", "free_seconds", "sizes", "noted"),
    [
        (5, FREE_SECONDS, {1}, 5),
        (enough(5) / 2, FREE_SECONDS, {1, 4}, int(enough(5) / 2)),
        (1.2 * enough(5), 0.0, {1, 4, 5}, None),
        (inf, 0.0, {1, 4, 5}, None),
        (5, inf, {1, 4, 5}, None),
    ],
    ids=["little waits", "some", "much", "not said", "time is given"],
)
def test_sizes_are_measured_that_the_waiting_work_is_worth(
    expected_epochs: float, free_seconds: float, sizes: set[int], noted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.train.profile._step_seconds", milliseconds)
    task = Small()
    members = tuple(
        Member(Trial(b, {"lr": 0.01 * (b + 1), "batch_size": 4}, seed=b, data_seed=0), 0, 2) for b in range(5)
    )
    array = Array(FusionKey("", "", 4), members, expected_epochs=expected_epochs)
    profile = measure(state_of(task), array, 10**9, free_seconds)
    assert profile.step_seconds.keys() == sizes
    assert (profile.measured_members, profile.expected_epochs) == (5, noted)


class Kept(Small):
    """Has one weight matrix of a megabyte, so the memory per member depends on the optimizer."""

    def data(self, config: Any) -> Any:
        x = torch.randn(8, 512)
        return TensorDataset(x), TensorDataset(x)

    def model(self, config: Any) -> nn.Module:
        return nn.Linear(512, 512, bias=False)

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, config["optimizer"])(model.parameters(), lr=config["lr"])


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_memory_is_for_members_with_two_tensors_of_state(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other members of the same structure may use another optimizer."""
    weights, state = 4 * 512 * 512, 0
    used = chain([10**6, 2 * 10**6], repeat(5 * 10**6))  # at first, with the trial, from its copy on

    def during(meter: MemoryMeter, step: Any) -> tuple[float, int]:
        nonlocal state
        seconds, state = step(), 2 * weights if optimizer == "Adam" else 0
        return seconds, 5 * 10**6

    monkeypatch.setattr(MemoryMeter, "used", lambda meter: next(used) + state)
    monkeypatch.setattr(MemoryMeter, "during", during)
    task = Kept()
    member = Member(Trial(0, {"lr": 0.01, "optimizer": optimizer}, seed=0, data_seed=0), 0, 1)
    profile = measure(state_of(task), Array(FusionKey("", "", 4), (member,)), 10**9)
    assert profile.member_memory == pytest.approx(8 * 10**6 + 2 * weights, abs=100)


def test_lone_members_of_all_classes_of_optimizers_stand_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean is weighted by the number of members per class of optimizer."""
    seconds = {torch.optim.SGD: 0.001, torch.optim.Adam: 0.002, torch.optim.Adagrad: 0.004}

    def timed(stepper: Any, batches: Any, tick: int) -> float:
        first, *others = stepper.runtimes
        return 0.007 if others else seconds[type(first.optimizer)]

    monkeypatch.setattr("shoal.train.profile._step_seconds", timed)
    task = Kept()
    members = tuple(
        Member(Trial(number, {"lr": 0.01, "optimizer": name}, seed=0, data_seed=0), 0, 1)
        for number, name in enumerate(["SGD", "Adam", "SGD", "Adagrad"])
    )
    profile = measure(state_of(task), Array(FusionKey("", "", 4), members), 10**9, inf)
    assert profile.step_seconds == {1: pytest.approx((0.001 + 0.002 + 0.001 + 0.004) / 4), 4: 0.007}


def test_other_classes_are_measured_where_a_larger_size_is_too_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four members cost 0.12 s, sixteen more than the rest of the budget, a single one of another class 0.03 s."""

    def timed(stepper: Any, batches: Any, tick: int) -> float:
        first, *others = stepper.runtimes
        return 0.003 if others else 0.001 if isinstance(first.optimizer, torch.optim.SGD) else 0.002

    monkeypatch.setattr("shoal.train.profile._step_seconds", timed)
    task = Kept()
    members = tuple(
        Member(Trial(number, {"lr": 0.01, "optimizer": name}, seed=0, data_seed=0), 0, 1)
        for number, name in enumerate(["SGD", "Adam"] * 8)
    )
    array = Array(FusionKey("", "", 4), members, expected_epochs=7)
    profile = measure(state_of(task), array, 10**9, 0.2)
    assert profile.step_seconds == {1: pytest.approx(0.0015), 4: 0.003}
    assert profile.expected_epochs == 7


def test_the_load_of_a_gpu_is_the_mean_over_the_steps_of_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the first step, which sets up, and not one reading after all steps."""
    readings: dict[int, list[float]] = {}
    size = [0]

    def timed(stepper: Any, batches: Any, tick: int) -> float:
        size[0] = len(stepper.runtimes)
        readings.setdefault(size[0], []).append(10.0 * (1 + tick % 3))
        return 0.001

    monkeypatch.setattr("shoal.train.profile._step_seconds", timed)
    monkeypatch.setattr("shoal.train.profile._counts_load", lambda device: True)
    monkeypatch.setattr("torch.cuda.utilization", lambda device: readings[size[0]][-1])
    seen: list[list[float]] = []
    monkeypatch.setattr(
        "shoal.train.profile._utilisation", lambda device, cores, loads: seen.append(list(loads)) or 0.5
    )
    task = Kept()
    members = tuple(Member(Trial(n, {"lr": 0.01, "optimizer": "SGD"}, seed=0, data_seed=0), 0, 1) for n in range(4))
    assert measure(state_of(task), Array(FusionKey("", "", 4), members), 10**9, inf).compute == 0.5
    (loads,) = seen
    assert len(loads) >= 8
    assert 100 * sum(loads) == pytest.approx(sum(readings[4][1 : 1 + len(loads)]))


def test_a_lone_member_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, one that finds cold caches, and three that count."""
    seconds = 0.001
    taken: list[float] = []
    monkeypatch.setattr(
        "shoal.train.profile._step_seconds", lambda stepper, batches, tick: taken.append(seconds) or seconds
    )
    member = Member(Trial(0, {"lr": 0.01, "optimizer": "SGD"}, seed=0, data_seed=0), 0, 1)
    found = measure(state_of(Kept()), Array(FusionKey("", "", 4), (member,)), 10**9)
    assert found.step_seconds == {1: seconds}
    assert len(taken) == 5


@pytest.mark.parametrize(
    ("device", "loads", "compute"),
    [("cuda", [0.2, 0.4], 0.3), ("cuda", [0.0], 0.01), ("cuda", [], 1.0), ("cpu", [], 0.5)],
    ids=["mean", "idle", "unknown", "cores of a slot"],
)
def test_the_compute_in_use(device: str, loads: list[float], compute: float) -> None:
    cores = 0.5 * torch.get_num_threads()
    assert _utilisation(torch.device(device), cores, loads) == pytest.approx(compute)


ITERATIONS = {
    "samples that stay in memory are not waited for": ("kept", "cpu", 0.03, 0.01, 1.0, 1.0),
    "waiting for input leaves the device idle": ("window", "cpu", 0.03, 0.0, 0.25, 0.25),
    "fetching that computes does not": ("batch", "cpu", 0.03, 0.03, 0.25, 1.0),
    "a GPU computes meanwhile": ("batch", "cuda", 0.005, 0.005, 1.0, 1.5),
    "it waits for what takes longer": ("batch", "cuda", 0.04, 0.0, 0.25, 0.25),
}


@pytest.mark.parametrize(("sharing", "device", "fetch", "cpu", "busy", "cores"), ITERATIONS.values(), ids=ITERATIONS)
def test_use_is_averaged_over_iterations(
    sharing: str, device: str, fetch: float, cpu: float, busy: float, cores: float
) -> None:
    train: Any = SimpleNamespace(
        sample_sharing=sharing, fetched=80, fetch_seconds=10 * fetch, fetch_cpu_seconds=10 * cpu
    )
    iteration = _Iteration.of(train, 8, 0.01, torch.device(device))
    assert iteration.fetch_seconds == pytest.approx(fetch)
    assert iteration.busy == pytest.approx(busy)
    assert iteration.average(1.0) == pytest.approx(cores)


class Recomputed(Kept):
    """Has a checkpointed part whose second run is outside of the array."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        hidden = checkpoint(lambda x: F.dropout(x, 0.5, model.training), model(batch[0]), use_reentrant=True)
        return hidden.square().mean()


def test_steps_that_are_refused_alone_have_the_profile_of_plain_steps() -> None:
    task, refusals = Recomputed(), list[str]()
    members = tuple(Member(Trial(n, {"lr": 0.01, "optimizer": "SGD"}, seed=n, data_seed=0), 0, 1) for n in range(4))
    array = Array(FusionKey("", "", 4), members)
    profile = measure(state_of(task), array, 10**9, inf, refusals.append)
    assert profile.step_seconds.keys() == {1, 4}
    assert not profile.fused_gain
    (refusal,) = refusals
    assert refusal.startswith("torch.utils.checkpoint(use_reentrant=True)")
    assert refusal.endswith("pass use_reentrant=False")
