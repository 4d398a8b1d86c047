"""`Task.end_epoch` is called once for each epoch of each trial, with its own model, in plain PyTorch and in arrays."""

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import StopsAfter
from test_carried_state import CPU, EPOCHS, STEPS, Habit, member, metrics
from torch import Tensor, nn

from shoal.core.activity import Activity
from shoal.core.array import Array, FusionKey, Member
from shoal.core.errors import TaskError
from shoal.core.job import Job, WorkerContext
from shoal.host.activity_clock import ActivityClock
from shoal.task import Task
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

KEY = FusionKey("one", "data", 4)


class Ends(Habit):
    """Trains by the default step, and does something at the end of an epoch; the loss of validation depends on it."""

    step = Task.step

    def __init__(self, prepare: Callable[[Any], None], end: Callable[[Any, Any], None]) -> None:
        super().__init__(prepare, lambda model, x: 1.0)
        self.end = end

    def loss(self, model: Any, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss if model.training else loss + model.extra()

    def end_epoch(self, model: nn.Module, config: Any) -> None:
        assert model.training
        self.end(model, config)


def run(
    task: Task, directory: Path, members: list[Member], *, plain: bool = False, control: JobControl | None = None
) -> list[Any]:
    sets = DataSets(task, CPU)
    keys = {KEY: "a reason"} if plain else {}
    directory.mkdir(parents=True, exist_ok=True)
    worker_state = WorkerState(task, sets, TrialCache(), CPU, directory, plain_keys=keys)
    context = WorkerContext(directory, b"", checkpoint_seconds=60.0)
    job = Job("job", (Array(KEY, tuple(members)),))
    builder = SignatureBuilder(task, sets)
    return list(Trainer(job, worker_state, builder, control or JobControl(prompt=True), context).run())


def nothing(model: Any) -> None:
    model.extra = lambda: 0.0


def buffered(model: Any) -> None:
    model.register_buffer("mean", torch.zeros(()))
    model.extra = lambda: model.mean


def clamp(model: Any, config: Any) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.clamp_(-4 * config["lr"], 4 * config["lr"])


def assign_data(model: Any, config: Any) -> None:
    for each in model.parameters():
        each.data = each.data * (1 - config["lr"])


def load(model: Any, config: Any) -> None:
    model.load_state_dict({name: value * (1 - config["lr"]) for name, value in model.state_dict().items()})


def replace_buffer(model: Any, config: Any) -> None:
    model.mean = 0.5 * model.mean + model.inner.weight.detach().mean() + config["lr"]


def two_buffers(model: Any) -> None:
    model.register_buffer("now", torch.zeros(4))
    model.register_buffer("before", torch.ones(4))
    model.extra = lambda: (model.now + 2 * model.before).square().sum()


def swap_buffers(model: Any, config: Any) -> None:
    model.now, model.before = model.before, model.now + config["lr"]


def keep_previous(model: Any, config: Any) -> None:
    model.before = model.now
    model.now = model.inner.weight.detach().mean(1)


def swap_data(model: Any, config: Any) -> None:
    one, other = model.inner.weight, model.second.weight
    one.data, other.data = other.data, one.data


def two_layers(model: Any) -> None:
    model.second = nn.Linear(4, 4)
    model.extra = lambda: model.second.weight.square().sum()


def noise(model: Any, config: Any) -> None:
    with torch.no_grad():
        model.out.weight.add_(0.01 * torch.randn(model.out.weight.shape, dtype=torch.float64))


class Weighted(nn.Module):
    """Adds what attributes of it hold to the loss of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.history = 0.0, []

    def forward(self) -> Any:
        return self.factor + sum(self.history)


def weighted(model: Any) -> None:
    model.extra = Weighted()


def set_float(model: Any, config: Any) -> None:
    model.extra.factor = model.inner.weight.norm().item()


def append(model: Any, config: Any) -> None:
    model.extra.history.append(model.inner.weight.norm().item())


HOOKS: dict[str, tuple[Callable[[Any], None], Callable[[Any, Any], None]]] = {
    "parameters in place": (nothing, clamp),
    "parameters by .data": (nothing, assign_data),
    "a state dict is loaded": (nothing, load),
    "a buffer is replaced": (buffered, replace_buffer),
    "swapped buffers": (two_buffers, swap_buffers),
    "a buffer keeps what another had": (two_buffers, keep_previous),
    "swapped .data": (two_layers, swap_data),
    "random numbers": (nothing, noise),
    "a number": (weighted, set_float),
    "a list": (weighted, append),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("hook", HOOKS)
def test_it_is_the_same_alone_and_in_an_array(hook: str, tmp_path: Path) -> None:
    task = Ends(*HOOKS[hook])
    members = [member(number) for number in range(3)]
    alone: dict[Any, float] = {}
    for each in members:
        alone |= metrics(run(task, tmp_path / "alone", [each], plain=True))
    without = run(Ends(HOOKS[hook][0], lambda model, config: None), tmp_path / "without", members, plain=True)
    assert metrics(without) != alone
    found = metrics(run(task, tmp_path / "array", members))
    assert found == pytest.approx(alone, rel=1e-9)
    assert found.keys() == {(number, epoch) for number in range(3) for epoch in (1, 2, 3)}
    for number in range(3):
        wanted, got = load_newest(tmp_path / "alone", number), load_newest(tmp_path / "array", number)
        assert wanted is not None
        assert got is not None
        torch.testing.assert_close(got.model, wanted.model, rtol=1e-9, atol=1e-12)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("looks", range(2, 2 * STEPS + 4))
def test_a_resume_calls_it_once_for_each_epoch(looks: int, tmp_path: Path) -> None:
    task = Ends(weighted, append)
    wanted = metrics(run(task, tmp_path / "whole", [member()], plain=True))
    control = StopsAfter(looks - 1)
    events = run(task, tmp_path / "parts", [member()], plain=True, control=control)
    assert control.stop_noticed
    assert metrics(events + run(task, tmp_path / "parts", [member()], plain=True)) == wanted
    assert len(wanted) == EPOCHS


def test_frozen_parameters_that_members_share_are_each_members_own_once_it_changes_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(model: Any) -> None:
        model.teacher = nn.Parameter(torch.ones(()), requires_grad=False)
        model.extra = lambda: model.teacher.square()

    def follow(model: Any, config: Any) -> None:
        model.teacher.mul_(1 - config["lr"])

    task, members = Ends(prepare, follow), [member(number) for number in range(2)]
    alone: dict[Any, float] = {}
    for each in members:
        alone |= metrics(run(task, tmp_path / "alone", [each], plain=True))
    caplog.set_level(logging.WARNING)
    assert metrics(run(task, tmp_path / "array", members)) == pytest.approx(alone, rel=1e-9)
    assert "`end_epoch` changes 'teacher', which is frozen and in memory that trials share" in caplog.text


def test_buffers_that_change_together_afterwards_train_in_plain_pytorch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def share(model: Any, config: Any) -> None:
        model.before = model.now
        model.now += model.inner.weight.detach().mean(1)

    task, members = Ends(two_buffers, share), [member(number) for number in range(2)]
    alone: dict[Any, float] = {}
    for each in members:
        alone |= metrics(run(task, tmp_path / "alone", [each], plain=True))
    without = Ends(two_buffers, lambda model, config: model.now.add_(model.inner.weight.detach().mean(1)))
    assert metrics(run(without, tmp_path / "without", members, plain=True)) != alone
    caplog.set_level(logging.WARNING)
    assert metrics(run(task, tmp_path / "array", members)) == pytest.approx(alone, rel=1e-9)
    assert "`end_epoch` changes which of the model's tensors share memory (before, now)" in caplog.text


def test_it_may_not_set_attributes_of_the_task(tmp_path: Path) -> None:
    task = Ends(nothing, lambda model, config: setattr(task, "best", 1))
    with pytest.raises(TaskError, match="the task's `end_epoch` sets its attribute 'best', which all trials share"):
        run(task, tmp_path, [member()])


@pytest.mark.parametrize("plain", [False, True], ids=["array", "plain"])
def test_its_time_counts_as_no_training_step(tmp_path: Path, plain: bool) -> None:
    readings = count()
    clock = ActivityClock(Activity.STEPS, lambda: float(next(readings)))
    with clock.running():
        run(Ends(nothing, clamp), tmp_path, [member(number) for number in range(3)], plain=plain)
    assert clock.seconds[Activity.END_EPOCH] == 3 * EPOCHS, "a reading of the clock at its begin, and one at its end"
