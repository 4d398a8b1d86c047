"""Which steppers may run in several threads at once, and that they train there as they do alone."""

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.cost.demand import Profile
from shoal.fuse.beside import beside
from shoal.planner.job import Member
from shoal.task import Task
from shoal.trial import Trial
from shoal.worker.learner import build
from shoal.worker.stepper import WATCHED, ApartStepper, FusedStepper, SerialStepper, Stepper, make_stepper

X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CPU = torch.device("cpu")
SECONDS = 20.0
STEPS = 10
MOST = 200
"""Steps within which the fastest way must be found."""


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns after every few steps of the interpreter."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Plain(Task):
    def data(self, config: Any) -> Any:
        raise NotImplementedError

    def model(self, config: Any) -> nn.Module:
        kinds = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Tanh(), nn.Linear(5, 6)]
        return nn.Sequential(*kinds).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch), batch)


class Noise(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch + torch.randn_like(batch)), batch)


class Clipped(Plain):
    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss


class Asking(Clipped):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * 2 if float(loss.detach()) > 1 else loss


class Activations(Plain):
    """Of one structure for each activation, so that trials of several are no array."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model[3] = nn.Tanh() if config["lr"] < 0.02 else nn.GELU()  # type: ignore[index, operator]
        return model


class PythonDraws(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + random.random())


class NumpyDraws(Plain):
    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        return super().step(model, batch + float(np.random.rand()), optimizer)


class Seeds(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        torch.manual_seed(1)
        return super().loss(model, batch)


class Keeps(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batch = batch.clone()
        return super().loss(model, self.batch)


def learners(task: Task, count: int = 3) -> list[Any]:
    trials = [Trial(b, {"lr": 0.01 * (b + 1)}, seed=b, data_seed=0) for b in range(count)]
    return [build(task, Member(trial, 0, 1), CPU) for trial in trials]


def step(stepper: Stepper, tick: int) -> Tensor:
    members = len(stepper.learners)
    return stepper.train_step([X] * members, [tick] * members)


def settle(stepper: Stepper) -> list[Tensor]:
    """Steps until it may run beside others, or `MOST`."""
    losses: list[Tensor] = []
    while not stepper.threadable and len(losses) < MOST:
        losses.append(step(stepper, len(losses)))
    return losses


def stepper_of(kind: type[Task], members: int, gain: float) -> Stepper:
    """One that steps all at once, or one member after another, as is known to be faster."""
    known = Profile({members: 1.0}, 10, 3, 0, 0, 1.0, 1.0, fused_gain={members: gain})
    return make_stepper(kind(), learners(kind(), members), known)


def test_steppers_in_threads_train_as_they_do_alone() -> None:
    kinds = [(Plain, 4, 2.0), (Plain, 3, 0.5), (Plain, 1, 1.0), (Noise, 3, 2.0), (Noise, 2, 0.5), (Clipped, 2, 1.0)]
    kinds.append((Asking, 3, 1.0))
    steppers, alone = ([stepper_of(*kind) for kind in kinds] for _ in range(2))
    losses = [settle(stepper) for stepper in steppers]
    barrier = Barrier(len(kinds), timeout=SECONDS)

    def run(stepper: Stepper, done: list[Tensor]) -> None:
        with beside(threads=1, alone=1):
            for _ in range(STEPS):
                barrier.wait()
                done.append(step(stepper, len(done)))

    with ThreadPoolExecutor(len(kinds)) as pool:
        for future in [pool.submit(run, *one) for one in zip(steppers, losses, strict=True)]:
            future.result(SECONDS)
    for stepper, other, done in zip(steppers, alone, losses, strict=True):
        assert all(torch.equal(loss, step(other, tick)) for tick, loss in enumerate(done))
        for mine, theirs in zip(stepper.learners, other.learners, strict=True):
            torch.testing.assert_close(mine.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Plain, Noise, Clipped, Asking])
def test_what_touches_its_own_alone_is_threadable(kind: type[Task]) -> None:
    stepper = make_stepper(kind(), learners(kind()))
    assert not stepper.threadable
    assert WATCHED <= len(settle(stepper)) < MOST


@pytest.mark.parametrize("kind", [PythonDraws, NumpyDraws, Seeds, Keeps])
def test_what_touches_more_is_not(kind: type[Task]) -> None:
    stepper = make_stepper(kind(), learners(kind()))
    assert len(settle(stepper)) == MOST


def test_what_seeds_the_generators_is_not() -> None:
    stepper = SerialStepper(Plain(), learners(Plain()))
    assert len(settle(stepper)) == MOST


def test_learners_apart_are_if_each_is() -> None:
    made = make_stepper(Activations(), learners(Activations()))
    assert isinstance(made, ApartStepper)
    assert len(settle(made)) < MOST
    mine = learners(Plain(), 1)
    assert not ApartStepper([made, SerialStepper(Plain(), mine)]).threadable


def test_a_compiled_step_is_not() -> None:
    stepper = FusedStepper(Plain(), learners(Plain()))
    settle(stepper)
    assert stepper.threadable
    stepper._steps._step.way = "compiled"  # type: ignore[union-attr]
    assert not stepper.threadable
