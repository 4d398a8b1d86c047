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
