"""Gradients that a `step` of the task's own leaves for its next one, through stops, caches, arrays and their checks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import Planned, save
from test_carried_state import CPU, EPOCHS, Habit, member, metrics, parts, whole
from torch import Tensor, nn

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Proven
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.core.trial import Trial
from shoal.task import Task
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.trial_runtime import build
from shoal.train.worker_state import TrialCache, WorkerState

KEY = FusionKey("one", "data", 4)


class Accumulates(Habit):
    """Takes the gradients of three batches together; an epoch has four."""

    def __init__(self) -> None:
        super().__init__(lambda model: setattr(model, "steps", 0), lambda model, x: 1.0)

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss = self.loss(model, batch) / 3
        loss.backward()
        model.steps += 1
        if model.steps % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


class Adversaries(Habit):
    """What the loss of one half leaves in the other is added to its next gradient."""

    def __init__(self) -> None:
        super().__init__(lambda model: None, lambda model, x: 1.0)

    def optimizer(self, model: Any, config: Any) -> Any:
        return [torch.optim.SGD(half.parameters(), lr=config["lr"]) for half in (model.inner, model.out)]

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        for sign, one in zip((1.0, -0.1), optimizer, strict=True):
            loss = self.loss(model, batch)
            (sign * loss).backward()
            one.step()
            one.zero_grad()
        return loss.detach()


class Damped(Accumulates):
    """Halves the gradients at the end of an epoch."""

    def end_epoch(self, model: nn.Module, config: Any) -> None:
        for each in model.parameters():
            each.grad = None if each.grad is None else each.grad / 2


class Forgets(Accumulates):
    """Drops the gradients at the end of an epoch."""

    def end_epoch(self, model: nn.Module, config: Any) -> None:
        model.zero_grad()


TASKS = {
    "accumulation by hand": Accumulates,
    "adversaries": Adversaries,
    "gradients halved": Damped,
    "gradients dropped": Forgets,
}


def alone(task: Task, directory: Path, members: list[Member]) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for each in members:
        found |= whole(task, directory / str(each.trial.number), each)
    return found


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("looks", [4, 6])
@pytest.mark.parametrize("kind", TASKS.values(), ids=TASKS)
def test_a_trial_that_is_stopped_goes_on_with_them(kind: type[Habit], looks: int, tmp_path: Path) -> None:
    assert parts(kind(), tmp_path, looks) == whole(kind(), tmp_path)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("looks", [4, 6])
@pytest.mark.parametrize("kind", TASKS.values(), ids=TASKS)
def test_an_array_that_is_stopped_goes_on_with_them(kind: type[Habit], looks: int, tmp_path: Path) -> None:
    members = [member(number) for number in range(3)]
    found = parts(kind(), tmp_path, looks, *members)
    assert found == pytest.approx(alone(kind(), tmp_path, members), rel=1e-9)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", TASKS.values(), ids=TASKS)
def test_trials_go_on_from_the_cache_of_their_process(kind: type[Habit], tmp_path: Path) -> None:
    """And pause at each epoch; then two of the three form an array."""
    task, sets = kind(), DataSets(kind(), CPU)
    (tmp_path / "cached").mkdir()
    worker_state = WorkerState(task, sets, TrialCache(), CPU, tmp_path / "cached")
    context = WorkerContext(tmp_path / "cached", b"", checkpoint_seconds=60.0)
    events = []
    for epoch, chosen in ((0, (0, 1, 2)), (1, (0, 2)), (1, (1,)), (2, (0, 1, 2))):
        members = tuple(Member(member(number).trial, epoch, epoch + 1) for number in chosen)
        job = Job("job", (Array(KEY, members),))
        events += list(Trainer(job, worker_state, SignatureBuilder(task, sets), JobControl(prompt=True), context).run())
    assert metrics(events) == pytest.approx(alone(task, tmp_path, [member(number) for number in range(3)]), rel=1e-9)
    checks = [event for event in events if isinstance(event, Proven)]
    assert any(event.checks for event in checks)
    assert {event.refusal for event in checks} == {""}


def test_members_leave_and_join_an_array_between_updates(tmp_path: Path) -> None:
    task, sets = Accumulates(), DataSets(Accumulates(), CPU)
    (tmp_path / "array").mkdir()
    worker_state = WorkerState(task, sets, TrialCache(), CPU, tmp_path / "array")
    context = WorkerContext(tmp_path / "array", b"", checkpoint_seconds=60.0)
    job = Job("job", (Array(KEY, tuple(member(number) for number in range(3))),))
    control = Planned({5: JobUpdate(leave=frozenset({1}))})
    events = list(Trainer(job, worker_state, SignatureBuilder(task, sets), control, context).run())
    events += list(
        Trainer(
            Job("job", (Array(KEY, (member(1, 1),)),)),
            worker_state,
            SignatureBuilder(task, sets),
            JobControl(prompt=True),
            context,
        ).run()
    )
    wanted = alone(task, tmp_path, [member(number) for number in range(3)])
    assert metrics(events) == pytest.approx(wanted, rel=1e-9)


def test_a_checkpoint_holds_them_as_plain_tensors(tmp_path: Path) -> None:
    runtime = build(Accumulates(), Member(Trial(0, {"lr": 0.1}, seed=0, data_seed=0), 0, EPOCHS), CPU)
    runtime.model.out.weight.grad = torch.full((1, 4), 3.0, dtype=torch.float64)  # type: ignore[union-attr]
    runtime.step = 1
    save(runtime, tmp_path)
    (path,) = (tmp_path / "checkpoints" / "000000").glob("*.state")
    assert torch.equal(
        torch.load(path, weights_only=True)["gradients"]["out.weight"], torch.full((1, 4), 3.0, dtype=torch.float64)
    )


def test_a_step_that_begins_without_gradients_keeps_none(tmp_path: Path) -> None:
    class Default(Accumulates):
        step = Task.step

    whole(Default(), tmp_path)
    state = load_newest(tmp_path / "whole", 0)
    assert state is not None
    assert state.gradients == {}


def test_trials_of_which_some_have_gradients_train_in_plain_pytorch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Drops(Accumulates):
        """One trial drops its gradients at the end of an epoch."""

        def end_epoch(self, model: nn.Module, config: Any) -> None:
            if config["lr"] > 0.04:
                model.zero_grad()

    members = [member(number) for number in range(3)]
    found = whole(Drops(), tmp_path / "array", *members)
    assert found == pytest.approx(alone(Drops(), tmp_path, members), rel=1e-9)
    assert found != pytest.approx(alone(Accumulates(), tmp_path / "others", members), rel=1e-9)
    assert (
        "an earlier step has left a gradient of 'inner.weight' in some members and none in members [0]" in caplog.text
    )
