"""Validation that cannot run for all trials at once runs for one after another, and training continues at once."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from contract_samples import Small, X, Y, runtimes, trial
from torch import Tensor, nn

from shoal.task import Task
from shoal.train.fused_stepper import FusedStepper
from shoal.train.stepper import PlainStepper, Stepper, StepRefusedError

TRIALS = 3
BATCHES = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
passes: list[str] = []
"""An entry for each pass of a model in training."""


class Net(nn.Module):
    """Depends on a mode, a count and a buffer, which a validation may change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)
        self.decoding = False
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            passes.append("training")
        self.calls += 1
        hidden = self.inner(x).tanh() * (2.0 if self.decoding else 1.0) + 0.01 * self.calls
        out: Tensor = self.outer(hidden + self.seen)
        return out


class Watched(Small):
    """Takes its steps by a function of its own, which an array always takes for all at once."""

    def model(self, config: Any) -> nn.Module:
        return Net().double()

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss


class Number(Watched):
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"positive": (model(batch[0]) > 0).double().mean().item()}


class Numpy(Watched):
    """An array's tensors raise other errors here than those that Shoal knows."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"spread": float(np.std(np.asarray(model(batch[0]).detach().cpu().tolist())))}


class Later(Watched):
    """Asks for a number from the second batch on, in a mode that it leaves only afterwards."""

    def metrics(self, model: Any, batch: Any) -> Mapping[str, Any]:
        model.decoding = True
        mean = model(batch[0]).mean()
        if batch[0] is not BATCHES[0][0] and not torch.equal(batch[0], BATCHES[0][0]) and mean > 0:
            mean = mean * 2
        model.decoding = False
        return {"mean": mean}


class Drawing(Watched):
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        out = model(batch[0])
        return {"noisy": (out + torch.randn_like(out)).mean().item(), "shared": torch.rand(1).item()}


class Evaluated(Watched):
    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).numpy()

    def evaluate(self, outputs: list[Any], config: Any) -> Mapping[str, float]:
        return {"whole": float(np.concatenate(outputs).std())}


class Writing(Watched):
    """Writes to its batch before it fails."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        batch[0].mul_(2)
        return {"mean": model(batch[0]).mean().item()}


def trained(stepper: Stepper) -> list[Any]:
    found: list[Any] = []
    for number in range(2):
        found.append(stepper.train_step([BATCHES[number]] * TRIALS, [2 * number] * TRIALS).tolist())
        found += stepper.validate([(x.clone(), y) for x, y in BATCHES])
        found.append(stepper.train_step([BATCHES[2]] * TRIALS, [2 * number + 1] * TRIALS).tolist())
    return found


@pytest.mark.parametrize("kind", [Number, Numpy, Later, Drawing, Evaluated, Writing], ids=lambda kind: kind.__name__)
def test_trials_validate_as_they_do_alone_and_train_at_once(kind: Callable[[], Task]) -> None:
    task, trials = kind(), [trial(number) for number in range(TRIALS)]
    passes.clear()
    found = trained(FusedStepper(task, runtimes(task, trials)))
    assert len(passes) == 4, "one pass for all trials at each step"
    for mine, alone in zip(found, trained(PlainStepper(task, runtimes(task, trials))), strict=True):
        assert mine == pytest.approx(alone, rel=1e-9)


class Seeing(Later):
    def metrics(self, model: Any, batch: Any) -> Mapping[str, Any]:
        model.seen += 1
        return super().metrics(model, batch)


class Overwriting(Later):
    def metrics(self, model: Any, batch: Any) -> Mapping[str, Any]:
        found = super().metrics(model, (batch[0], batch[1].add_(1)))
        batch[1].sub_(1)
        return found


@pytest.mark.parametrize("kind", [Seeing, Overwriting])
def test_a_validation_that_has_written_and_fails_late_is_refused(kind: Callable[[], Task]) -> None:
    task = kind()
    stepper = FusedStepper(task, runtimes(task, [trial(number) for number in range(TRIALS)]))
    with pytest.raises(StepRefusedError, match=r"a plain value .* in a validation that writes to the model"):
        stepper.validate([(x, y.clone()) for x, y in BATCHES])


def test_the_reason_is_logged_once_for_a_task(caplog: pytest.LogCaptureFixture) -> None:
    class Twice(Number):
        pass

    for _ in range(2):
        FusedStepper(task := Twice(), runtimes(task, [trial(number) for number in range(TRIALS)])).validate(BATCHES)
    (said,) = [record.getMessage() for record in caplog.records if "one after another" in record.getMessage()]
    assert "Number.metrics (test_validation_by_members.py:" in said


class KeepsModes(Small):
    """Has a dropout that stays in evaluation mode, as parts of Lightning modules may."""

    _keeps_train_modes = True

    def model(self, config: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
        model[1].eval()
        return model


@pytest.mark.parametrize("stepper", [FusedStepper, PlainStepper])
def test_modes_are_those_of_before_a_validation(stepper: Any) -> None:
    task = KeepsModes()
    trained = stepper(task, own := runtimes(task, [trial(number) for number in range(TRIALS)]))
    for step in range(2):
        trained.train_step([BATCHES[0]] * TRIALS, [step] * TRIALS)
        trained.validate(BATCHES)
        trained.synchronize()
        assert [[part.training for part in each.model] for each in own] == [[True, False, True]] * TRIALS
    deterministic = stepper(task, runtimes(task, [trial(number) for number in range(TRIALS)]))
    for step in (5, 6):  # other random numbers, which nothing draws
        deterministic.train_step([BATCHES[0]] * TRIALS, [step] * TRIALS)
    for each, other in zip(own, deterministic.runtimes, strict=True):
        torch.testing.assert_close(each.model.state_dict(), other.model.state_dict(), rtol=1e-12, atol=0)


class Outputs(Small):
    """Counts samples by a number among its outputs."""

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]), len(batch[0]), 0.5

    def evaluate(self, outputs: list[Any], config: Any) -> Mapping[str, float]:
        assert all((type(count), type(half)) == (int, float) for _, count, half in outputs)
        return {"sum": float(sum(half * out.sum() for out, _, half in outputs)) / sum(count for _, count, _ in outputs)}


def test_numbers_among_outputs_are_numbers_in_an_array_too() -> None:
    task = Outputs()
    trials = [trial(number) for number in range(TRIALS)]
    array, alone = FusedStepper(task, runtimes(task, trials)), PlainStepper(task, runtimes(task, trials))
    found, wanted = array.validate(BATCHES), alone.validate(BATCHES)
    assert array._validator is None
    for values, others in zip(found, wanted, strict=True):
        assert values == pytest.approx(others, rel=1e-12)
