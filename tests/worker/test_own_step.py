"""A task's own training step: of all trials at once where that can be."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import FusionError, TaskError
from shoal.planner.job import Member
from shoal.task import Task
from shoal.trial import Trial
from shoal.worker.learner import build
from shoal.worker.own_step import OwnStep
from shoal.worker.stepper import FusedStepper

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CPU = torch.device("cpu")


class Two(Task):
    """An optimizer for the body and one for the head."""

    def data(self, config: Any) -> Any:
        raise NotImplementedError

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        adam = torch.optim.Adam(model[:2].parameters(), lr=config["lr"], eps=1e-2)  # type: ignore[index]
        return adam, torch.optim.SGD(model[2].parameters(), lr=config["lr"], momentum=0.9)  # type: ignore[index]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch), batch)

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        for one in optimizer:
            one.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for one in optimizer:
            one.step()
        return loss


class AsksLate(Two):
    """After two steps it looks at a number, when both optimizers have stepped."""

    calls = 0

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        self.calls += 1
        return loss * (1.0 if self.calls < 3 or float(loss.detach()) > 0 else 0.0)


class Rates(Two):
    """It changes the learning rate by itself."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        for one in optimizer:
            one.param_groups[0]["lr"] *= 0.9
        return super().step(model, batch, optimizer)


class Closure(Two):
    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=config["lr"], max_iter=2)

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            return loss

        return torch.as_tensor(optimizer.step(closure))


def learners(task: Task, count: int = 3) -> list[Any]:
    trials = [Trial(b, {"lr": 0.01 * (b + 1)}, seed=b, data_seed=0) for b in range(count)]
    return [build(task, Member(trial, 0, 1), CPU) for trial in trials]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Two, ""),
        (AsksLate, "a plain value is asked for"),
        (Rates, "an optimizer is asked for 'param_groups'"),
        (Closure, "needs a closure"),
    ],
    ids=lambda value: getattr(value, "__name__", "why"),
)
def test_steps_equal_those_of_each_alone(kind: type[Task], message: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    fused, alone = learners(kind()), learners(kind())
    stepper = FusedStepper(kind(), fused)
    tasks = [kind() for _ in alone]
    for tick in range(5):
        losses = stepper.train_step([X] * len(fused), [tick] * len(fused))
        own = [t.step(x.model, X, x.optimizer) for t, x in zip(tasks, alone, strict=True)]
        torch.testing.assert_close(losses, torch.stack(own).detach(), rtol=1e-9, atol=0)
    for mine, other in zip(fused, alone, strict=True):
        torch.testing.assert_close(mine.model.state_dict(), other.model.state_dict(), rtol=1e-9, atol=1e-12)
    warned = [record.getMessage() for record in caplog.records if "one member after another" in record.getMessage()]
    assert len(warned) == bool(message)
    assert all(message in text for text in warned)


def test_several_optimizers_need_a_step() -> None:
    class Default(Two):
        step = Task.step

    with pytest.raises(TaskError, match="`optimizer` returns several; override `step`"):
        learners(Default())


def test_optimizers_nested_differently_are_refused() -> None:
    class Mixed(Two):
        def optimizer(self, model: nn.Module, config: Any) -> Any:
            both = super().optimizer(model, config)
            return both if config["lr"] > 0.01 else list(both)

    task = Mixed()
    mixed = learners(task)
    array = FusedStepper(Two(), learners(Two()))._array
    with pytest.raises(FusionError, match="nests its optimizers differently"):
        OwnStep(array, mixed, task.step)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    class Wide(Two):
        def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
            return model(batch)

    with pytest.raises(TaskError, match=r"'loss' must be a real scalar tensor, got torch.float64 of shape \(5, 3\)"):
        FusedStepper(Wide(), learners(Wide())).train_step([X] * 3, [0] * 3)
