"""A frozen base model that trials have in common is stored once, while models are built and while they train."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Trial
from shoal.fuse import frozen
from shoal.fuse.frozen import share_frozen
from shoal.task import Task
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.profile import measure
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.stepper import PlainStepper
from shoal.train.trial_runtime import build
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
LARGE = 1003
FEATURES = 11
BYTES = LARGE * FEATURES * 8
"""Of the base's weight; nothing else here is as large: arrays of fewer members have fewer biases of the base."""


@pytest.fixture(autouse=True)
def only_what_is_new() -> Iterator[None]:
    """Freeze existing objects in the garbage collector, so that collections are fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a base of this size large enough for sharing."""
    monkeypatch.setattr(frozen, "MIN_SHARED_BYTES", BYTES)


def bases() -> int:
    """Return the number of live storages of parameters as large as the weight of the base.

    A checkpoint that is written has a copy of it, which is no parameter.
    """
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is nn.Parameter]
    memories = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size == BYTES for size in memories.values())


class Headed(Task):
    """Builds a new head on a base, and records the number of live bases at each call of `model`."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def data(self, config: Any) -> Any:
        x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return TensorDataset(x), TensorDataset(x)

    def model(self, config: Any) -> nn.Module:
        self.held.append(bases())
        base = nn.Linear(FEATURES, LARGE, dtype=torch.float64)
        with torch.no_grad():
            base.weight.fill_(0.01)
            base.bias.zero_()
        return nn.Sequential(base.requires_grad_(False), nn.Linear(LARGE, 2, dtype=torch.float64))

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.SGD(model[1].parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    def batch_size(self, config: Any) -> int:
        return 4


class HeadedOwnStep(Headed):
    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        return super().step(model, batch, optimizer)


class Unfreezing(Headed):
    """Trains the base, too, from its second step on."""

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        if not model[0].weight.requires_grad:
            optimizer.add_param_group({"params": list(model[0].requires_grad_(True).parameters())})
        return loss


class Decayed(nn.Linear):
    """Decays its frozen weight in place, from a call in training on."""

    def __init__(self, first: int, through_data: bool) -> None:
        super().__init__(FEATURES, LARGE, dtype=torch.float64)
        self.first, self.through_data, self.calls = first, through_data, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls > self.first:
            with torch.no_grad():
                (self.weight.data if self.through_data else self.weight).mul_(0.5)
        return super().forward(x)


class SomeDecay(Headed):
    """Trials with `first` decay their base."""

    def model(self, config: Any) -> nn.Module:
        model: Any = super().model(config)
        if "first" in config:
            decayed = Decayed(config["first"], config["through_data"])
            decayed.load_state_dict(model[0].state_dict())
            model[0] = decayed.requires_grad_(False)
        return model


def members(count: int) -> tuple[Member, ...]:
    return tuple(Member(Trial(b, {"lr": 0.01 * (b + 1)}, seed=b, data_seed=0), 0, 2) for b in range(count))


@pytest.mark.parametrize("kind", [Headed, HeadedOwnStep])
def test_trials_are_built_with_one_base(kind: type[Headed], tmp_path: Path) -> None:
    task = kind()
    sets = DataSets(task, CPU)
    worker_state = WorkerState(task, sets, TrialCache(), CPU, tmp_path)
    job = Job("job", (Array(FusionKey("", "", 4), members(5)),))
    for _ in Trainer(job, worker_state, SignatureBuilder(task, sets), JobControl(), WorkerContext(tmp_path, b"")).run():
        task.held.append(bases())
    assert max(task.held) == 1


@pytest.mark.parametrize(
    ("first", "through_data"), [(0, False), (0, True), (5, False)], ids=["at once", "through data", "later"]
)
def test_a_trial_that_writes_to_its_base_leaves_that_of_another(first: int, through_data: bool, tmp_path: Path) -> None:
    configs = [{"lr": 0.01}, {"lr": 0.01, "first": first, "through_data": through_data}]
    trials = [Trial(number, config, seed=number, data_seed=0) for number, config in enumerate(configs)]
    arrays = [Array(FusionKey(f"{each.number}", "", 4), (Member(each, 0, 4),)) for each in trials]
    found = []
    for folder, packs in (("apart", [[one] for one in arrays]), ("packed", [arrays])):
        (tmp_path / folder).mkdir()
        losses = {}
        for pack in packs:
            task = SomeDecay()
            sets = DataSets(task, CPU)
            worker_state = WorkerState(task, sets, TrialCache(), CPU, tmp_path / folder)
            signatures = SignatureBuilder(task, sets)
            context = WorkerContext(tmp_path / folder, b"")
            for event in Trainer(Job("job", tuple(pack)), worker_state, signatures, JobControl(), context).run():
                if isinstance(event, Reported):
                    losses |= {(each.trial, each.epoch): each.metrics["valid_loss"] for each in event.reports}
        found.append(losses)
    apart, packed = found
    assert len(apart) == 8
    assert packed == pytest.approx(apart, rel=1e-12)


def test_a_profile_holds_one_base(tmp_path: Path) -> None:
    task = Headed()
    state = WorkerState(task, DataSets(task, CPU), TrialCache(), CPU, tmp_path)
    measure(state, Array(FusionKey("", "", 4), members(5)), 10**9)
    assert len(task.held) == 5, "each trial is built once"
    assert max(task.held) == 1


def test_one_after_another_a_base_that_is_trained_is_its_own() -> None:
    task, batch = Unfreezing(), [torch.ones(4, FEATURES, dtype=torch.float64)]
    lent, alone = ([build(task, member, CPU) for member in members(3)] for _ in range(2))
    for runtime in lent:
        share_frozen(lent[0].model, runtime.model)
    for runtimes in (lent, alone):
        steppers = [PlainStepper(task, [runtime]) for runtime in runtimes]
        for tick in range(3):
            for stepper in steppers:
                stepper.train_step([batch], [tick])
    for mine, other in zip(lent, alone, strict=True):
        torch.testing.assert_close(mine.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
