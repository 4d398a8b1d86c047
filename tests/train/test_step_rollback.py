"""A step that cannot be taken at once is refused, and trials continue from their checkpoints."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pack_samples import Mixed, Shop, reports_in, whole
from torch import Tensor, nn

from shoal.core.array import Member
from shoal.core.trial import Trial
from shoal.task import Task
from shoal.train.fused_stepper import FusedStepper
from shoal.train.stepper import PlainStepper, Stepper, StepRefusedError
from shoal.train.trial_runtime import build

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WORDS = torch.tensor([0, 2, 1, 2, 0])
CPU = torch.device("cpu")


class Replacing(torch.optim.Optimizer):
    """Optimizer that allocates new memory at each update, with a moment in its state and a count outside it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "updates": 0})
        self.count = 0
        self.moments: dict[str, list[Tensor]] = {"first": []}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        group = self.param_groups[0]
        group["updates"] += 1
        for i, p in enumerate(group["params"]):
            state = self.state[p]
            state["moment"] = 0.9 * state.get("moment", torch.zeros_like(p)) + p.grad
            if self.count == 1:
                self.moments["first"].append(torch.zeros_like(p))
            self.moments["first"][i].mul_(0.5).add_(p.grad)
            change = state["moment"] + self.moments["first"][i] / (self.count + group["updates"])
            p.data = p.data - group["lr"] * change


class Counting(nn.Module):
    """Model with running statistics, a number, and a tensor that is created when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3)).double()
        self.calls = 0
        self.seen: list[float] = [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not hasattr(self, "shift"):
            self.shift = torch.zeros(3, dtype=torch.float64)
        self.shift = self.shift + 0.1
        return self.net(x) * self.calls + self.shift


class ByHand(Task):
    def data(self, config: Any) -> Any:
        raise NotImplementedError

    def model(self, config: Any) -> nn.Module:
        return Counting()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return Replacing(model.parameters(), config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch), batch * random.random() * float(np.random.rand()))


class ByHandOwnStep(ByHand):
    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        return super().step(model, batch, optimizer)


class Words(ByHand):
    """Has sparse gradients in one group, which is detected after the other group was updated."""

    def model(self, config: Any) -> nn.Module:
        parts = {"words": nn.Embedding(3, 3, sparse=True), "head": nn.Linear(3, 3)}
        return nn.ModuleDict(parts).double()

    def optimizer(self, model: Any, config: Any) -> Any:
        groups = [{"params": model["head"].parameters()}, {"params": model["words"].parameters()}]
        return torch.optim.SGD(groups, lr=config["lr"])

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model["head"](model["words"](WORDS)), batch)


def runtimes(task: Task, count: int = 3) -> list[Any]:
    trials = [Trial(b, {"lr": 0.01 * (b + 1)}, seed=b, data_seed=0) for b in range(count)]
    return [build(task, Member(trial, 0, 1), CPU) for trial in trials]


def history(stepper: Stepper, steps: int = 4) -> Tensor:
    """Return the losses, [steps, B]; the process-wide generators are seeded equally at every step."""
    losses = []
    for tick in range(steps):
        random.seed(tick)
        np.random.seed(tick)
        count, batch = len(stepper.runtimes), X.clone()
        losses.append(stepper.train_step([batch] * count, [tick] * count))
    return torch.stack(losses)


CASES = {
    "an optimizer that replaces the memory of its parameters": ByHand,
    "the same in a step of the task's own": ByHandOwnStep,
    "sparse gradients in a second group": Words,
}


@pytest.mark.parametrize("kind", CASES.values(), ids=CASES)
def test_a_first_step_that_cannot_be_taken_at_once_is_refused(kind: type[Task]) -> None:
    with pytest.raises(StepRefusedError):
        history(FusedStepper(kind(), runtimes(kind())))


class Accumulating(ByHand):
    """One update for three batches, a model that follows the other, and a look at a number at the end of one step.

    A batch is a tensor and the step's number.
    """

    looks = 4

    def model(self, config: Any) -> nn.Module:
        model = nn.ModuleDict({"online": nn.Linear(3, 3), "target": nn.Linear(3, 3)}).double()
        model["target"].requires_grad_(False)
        return model

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.Adam(model["online"].parameters(), lr=config["lr"])

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        x, number = batch
        loss = F.mse_loss(model["online"](x), model["target"](x))
        loss.backward()  # type: ignore[no-untyped-call]
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        for target, online in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
            target.data.mul_(0.9).add_(online.data, alpha=0.1)
        if number == self.looks and float(loss.detach()) < 0:
            raise ValueError("a loss is negative")
        return loss


class LooksAtAnUpdate(Accumulating):
    looks = 5


class LooksAtTheFirstUpdate(Accumulating):
    looks = 2


class Cools(Accumulating):
    """Changes a frozen parameter that all members share, and reads it in its first step."""

    looks = 0

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)
        return model

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        with torch.no_grad():
            model.scale.mul_(0.9)
        return super().step(model, [batch[0] * model.scale, batch[1]], optimizer)


class Scheduled(LooksAtAnUpdate):
    """Steps its optimizers one by one, and changes their settings between steps."""

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.Adafactor(model["online"].parameters(), lr=config["lr"])


@pytest.mark.parametrize("kind", [Accumulating, LooksAtAnUpdate, LooksAtTheFirstUpdate, Cools, Scheduled])
def test_a_step_that_asks_is_refused(kind: type[Accumulating]) -> None:
    together, alone = runtimes(kind()), runtimes(kind())
    stepper, plain = FusedStepper(kind(), together), PlainStepper(kind(), alone)
    for number in range(9):
        for runtime in (*together, *alone):
            runtime.optimizer.param_groups[0]["lr"] *= 0.9
        batch: list[Any] = [X, number]
        each = plain.train_step([batch] * 3, [number] * 3)
        if number == kind.looks:
            with pytest.raises(StepRefusedError, match=r"`step`, \w+\.step \(test_\w+\.py:\d+\): a plain value is"):
                stepper.train_step([batch] * 3, [number] * 3)
            return
        torch.testing.assert_close(stepper.train_step([batch] * 3, [number] * 3), each, rtol=1e-9, atol=0)
    raise AssertionError("no step asked")


class LooksLate(Mixed):
    """Overrides `step`, which after some calls reads the loss as a number."""

    def __init__(self, calls: int) -> None:
        self.calls = iter(range(calls))

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        if next(self.calls, None) is None and float(loss.detach()) < 0:
            raise ValueError("a loss is negative")
        return loss


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("calls", [0, 1, 5, 10])
@pytest.mark.parametrize("seconds", [30.0, 0.0], ids=["few checkpoints", "many"])
def test_a_job_goes_on_from_checkpoints_as_if_it_had_trained_plainly(
    calls: int, seconds: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    together = reports_in(Shop(LooksLate(calls), tmp_path / "one").run([whole(0), whole(1), whole(8)], seconds=seconds))
    if calls:  # plain copies of members call it as well, so one call may be over at the first step
        assert "go back to their checkpoints" in caplog.text
    found = {(report.trial, report.epoch): report.metrics for report in together}
    for number in (0, 1, 8):
        for report in reports_in(Shop(LooksLate(0), tmp_path / str(number)).run([whole(number)])):
            assert found[number, report.epoch] == pytest.approx(report.metrics, rel=1e-9)
