"""A task's own training step is called for all trials at once if possible."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.array import Member
from shoal.core.errors import FusionError, TaskError
from shoal.core.trial import Trial
from shoal.task import Task
from shoal.train.custom_step import CustomStep
from shoal.train.fused_stepper import FusedStepper
from shoal.train.make_stepper import make_stepper
from shoal.train.stepper import PlainStepper, StepRefusedError
from shoal.train.trial_runtime import build

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CPU = torch.device("cpu")


class Two(Task):
    """Has one optimizer for the body and one for the head."""

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


class Asks(Two):
    """Reads a number after both optimizers have stepped."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        return loss * (1.0 if float(loss.detach()) > 0 else 0.0)


class Rates(Two):
    """Changes the learning rate in `step`."""

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


def runtimes(task: Task, count: int = 3) -> list[Any]:
    trials = [Trial(b, {"lr": 0.01 * (b + 1)}, seed=b, data_seed=0) for b in range(count)]
    return [build(task, Member(trial, 0, 1), CPU) for trial in trials]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Two, ""),
        (Asks, "a plain value is asked for"),
        (Rates, "an optimizer is asked for 'param_groups'"),
        (Closure, "needs a closure"),
    ],
    ids=lambda value: getattr(value, "__name__", "why"),
)
def test_steps_equal_those_of_each_alone(kind: type[Task], message: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    fused, alone = runtimes(kind()), runtimes(kind())
    stepper = make_stepper(kind(), fused)
    if message and not stepper.refusal:
        with pytest.raises(StepRefusedError, match=message):
            stepper.train_step([X] * len(fused), [0] * len(fused))
        return
    tasks = [kind() for _ in alone]
    for tick in range(5):
        losses = stepper.train_step([X] * len(fused), [tick] * len(fused))
        own = [t.step(x.model, X, x.optimizer) for t, x in zip(tasks, alone, strict=True)]
        torch.testing.assert_close(losses, torch.stack(own).detach(), rtol=1e-9, atol=0)
    for mine, other in zip(fused, alone, strict=True):
        torch.testing.assert_close(mine.model.state_dict(), other.model.state_dict(), rtol=1e-9, atol=1e-12)
    warned = [record.getMessage() for record in caplog.records if "cannot be one array" in record.getMessage()]
    assert len(warned) == bool(message)
    assert all(message in text for text in warned)


class Configured(Two):
    """Uses floats of the config in the loss: plain ones, nested ones, and in arithmetic."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any, config: Any) -> Tensor:
        for one in optimizer:
            one.zero_grad()
        y = model(batch)
        alpha, shared, inner = config["alpha"], config["shared"], config["inner"]["beta"]
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = (1 - alpha) * F.mse_loss(y, batch) + alpha * F.l1_loss(y, batch) + (-inner) ** 2 * shared * penalty
        loss = loss + F.smooth_l1_loss(y, batch, beta=abs(inner)) + config.get("none", 0.5) * y.clamp(max=alpha).mean()
        assert isinstance(alpha, float)
        assert config["kinds"] == ["a"]
        assert "none" not in config
        loss.backward()
        for one in optimizer:
            one.step()
        return loss


class ConfiguredBy(Two):
    """As `Configured`, with a function of the config called in `step`."""

    def look(self, config: Any) -> float:
        return float(config["alpha"])

    def step(self, *args: Any) -> Tensor:
        model, batch, optimizer, config = args
        factor = self.look(config)
        for one in optimizer:
            one.zero_grad()
        loss = self.loss(model, batch) * factor
        loss.backward()
        for one in optimizer:
            one.step()
        return loss


class TruthValue(ConfiguredBy):
    def look(self, config: Any) -> float:
        return 2.0 if config["alpha"] > 0.3 else 0.5


class AnInteger(ConfiguredBy):
    def look(self, config: Any) -> float:
        return float(config["count"])


class AnInnerString(ConfiguredBy):
    def look(self, config: Any) -> float:
        return len(config["inner"]["name"])


class AKeyOfSome(ConfiguredBy):
    def look(self, config: Any) -> float:
        return 2.0 if "extra" in config else 0.5


class AllOfThem(ConfiguredBy):
    def look(self, config: Any) -> float:
        return sum(value for value in dict(config).values() if isinstance(value, float))


def configured(task: Task, count: int = 3) -> list[Any]:
    """Return runtimes whose configs differ in floats, an integer, a nested string, and a key."""
    found = []
    for b in range(count):
        config = {"lr": 0.01 * (b + 1), "alpha": 0.2 * (b + 1), "shared": 0.25, "count": b + 1, "kinds": ["a"]}
        config |= {"inner": {"beta": 0.1 + b, "name": "ab"[:b]}, **({"extra": 1} if b else {})}
        found.append(build(task, Member(Trial(b, config, seed=b, data_seed=0), 0, 1), CPU))
    return found


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Configured, ""),
        (ConfiguredBy, "a plain value is asked for"),
        (TruthValue, "a plain value is asked for"),
        (AnInteger, "'count' differs between the members' configs and is not a float"),
        (AnInnerString, "'inner.name' differs between the members' configs and is not a float"),
        (AKeyOfSome, "only some members' configs have 'extra'"),
        (AllOfThem, "'count' differs"),
    ],
    ids=lambda value: getattr(value, "__name__", "why"),
)
def test_a_step_is_given_the_config(kind: type[Task], message: str) -> None:
    task = kind()
    fused, alone, serial = configured(task), configured(task), configured(task)
    if message:
        with pytest.raises(StepRefusedError, match=message):
            make_stepper(task, fused).train_step([X] * len(fused), [0] * len(fused))
        fused = []
    steppers = [PlainStepper(task, serial), *([make_stepper(task, fused)] if fused else [])]
    for tick in range(4):
        own = [task.step(x.model, X, x.optimizer, x.trial.config).detach() for x in alone]
        for stepper in steppers:
            losses = stepper.train_step([X] * len(own), [tick] * len(own))
            torch.testing.assert_close(losses, torch.stack(own), rtol=1e-9, atol=0)
    for one in (*fused, *serial):
        other = alone[one.trial.number]
        torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_float_of_the_config_leaves_the_type_as_it_is_alone(dtype: torch.dtype) -> None:
    class Typed(Two):
        def model(self, config: Any) -> nn.Module:
            return super().model(config).to(dtype)

        def step(self, model: nn.Module, batch: Any, optimizer: Any, config: Any) -> Tensor:
            loss = self.loss(model, batch)
            assert (-config["alpha"] * loss).dtype == (abs(config["alpha"]) * loss).dtype == loss.dtype
            return loss * (1 - config["alpha"])

    task = Typed()
    losses = FusedStepper(task, configured(task)).train_step([X.to(dtype)] * 3, [0] * 3)
    assert losses.dtype == dtype


def test_several_optimizers_need_a_step() -> None:
    class Default(Two):
        step = Task.step

    with pytest.raises(TaskError, match="`optimizer` returns several; override `step`"):
        runtimes(Default())


def test_an_optimizer_with_a_closure_needs_a_step() -> None:
    class Default(Closure):
        step = Task.step

    with pytest.raises(TaskError, match="returns LBFGS, which needs a closure to step; override `step`"):
        runtimes(Default())


def test_optimizers_nested_differently_are_refused() -> None:
    class Mixed(Two):
        def optimizer(self, model: nn.Module, config: Any) -> Any:
            both = super().optimizer(model, config)
            return both if config["lr"] > 0.01 else list(both)

    task = Mixed()
    mixed = runtimes(task)
    array = FusedStepper(Two(), runtimes(Two()))._array
    with pytest.raises(FusionError, match="nests its optimizers differently"):
        CustomStep(array, mixed, task)


def test_a_loss_that_is_not_a_scalar_is_refused() -> None:
    class Wide(Two):
        def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
            return model(batch)

    with pytest.raises(TaskError, match=r"'loss' must be a real scalar tensor, got torch.float64 of shape \(5, 3\)"):
        FusedStepper(Wide(), runtimes(Wide())).train_step([X] * 3, [0] * 3)
