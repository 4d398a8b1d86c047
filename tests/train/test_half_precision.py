"""Float16 training with a loss scale per trial equals a loop with `GradScaler`: alone, fused and resumed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SAMPLES, SIZE, Planned, StopsAfter, X, Y, runtimes, trial, work
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.errors import TaskError
from shoal.core.job import JobUpdate
from shoal.core.trial import Origin, Trial, TrialState
from shoal.fuse.generators import seed_all
from shoal.task import Task
from shoal.train import array_trainer
from shoal.train.checkpoint import load_newest
from shoal.train.checkpoint_paths import copy_checkpoint
from shoal.train.data.loader import epoch_order
from shoal.train.stepper import PlainStepper
from shoal.train.worker_state import TrialCache

EPOCHS = 3
ROUNDING = torch.finfo(torch.float16).eps
"""Of weights after some steps: fused and plain products may round differently."""
OVERFLOWS = 2.0**12
"""Weight of the hard sample with which the gradients of the first loss scales overflow."""
HARD = torch.arange(SAMPLES) == 5


class Weighted(nn.Module):
    """Network with the weight of the hard sample in its loss."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.register_buffer("weight", torch.tensor(weight), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Half(Task):
    """Has three steps per epoch, one of them with the hard sample."""

    def data(self, config: Any) -> Any:
        x, y = X.float(), Y.float()
        return TensorDataset(x, y, HARD), TensorDataset(x[:6], y[:6], HARD[:6])

    def model(self, config: Any) -> nn.Module:
        return Weighted(config.get("weight", 1.0))

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-2)

    def precision(self, config: Any) -> str:
        return "16-mixed"

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y, hard = batch
        out = model(x)
        assert out.dtype == torch.float16
        return ((out.float() - y).square().mean(1) * torch.where(hard, model.weight, 1.0)).mean() / 8

    def batch_size(self, config: Any) -> int:
        return SIZE


class All(Half):
    """Combines accumulation, clipping, averages, a schedule of steps, and epochs of three steps with passes of two."""

    scheduler_interval = "step"

    def accumulate(self, config: Any) -> int:
        return 2

    def clip_norm(self, config: Any) -> float | None:
        return 0.1 * (1 + config["number"])

    def ema(self, config: Any) -> float | None:
        return 0.5

    def steps_per_epoch(self, config: Any) -> int | None:
        return 3

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def passes(task: Task, one: Trial, number: int) -> list[tuple[Tensor, ...]]:
    batches, size = epoch_order(SAMPLES, one.data_seed, number).split(SIZE), task.accumulate(one.config)
    return [batches[first : first + size] for first in range(0, len(batches), size)]


def plain(task: Task, one: Trial, epochs: int = EPOCHS) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights, averaged if asked for, and the scaler state of a plain loop."""
    seed_all(one.seed, CPU)
    model: Any = task.model(one.config)
    optimizer = task.optimizer(model, one.config)
    scheduler = task.scheduler(optimizer, one.config)
    scaler = torch.amp.GradScaler("cpu")
    norm, decay = task.clip_norm(one.config), task.ema(one.config)
    average: dict[str, Tensor] = {}
    groups = [group for number in range(99) for group in passes(task, one, number)]
    for group in groups[: epochs * (task.steps_per_epoch(one.config) or len(passes(task, one, 0)))]:
        optimizer.zero_grad()
        for rows in group:
            with torch.autocast("cpu", torch.float16):
                loss = Half.loss(task, model, (X[rows].float(), Y[rows].float(), HARD[rows]))
            scaler.scale(loss * len(rows) / sum(map(len, group))).backward()
        scaler.unscale_(optimizer)
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            optimizer._opt_called = True  # else a schedule warns of a first step that is left out
            scheduler.step()
        for name, each in model.named_parameters() if decay is not None else ():
            now = each.detach().clone()
            average[name] = decay * average[name] + (1 - decay) * now if name in average else now
    return {**model.state_dict(), **average}, scaler.state_dict()


def train_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train all trials in plain PyTorch from their first step on."""
    monkeypatch.setattr(array_trainer, "make_stepper", lambda task, chosen, *_: PlainStepper(task, chosen))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", [Half, All], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("plainly", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("stop", [None, 4], ids=["in one go", "stopped within an epoch"])
def test_weights_and_scales_equal_those_of_a_plain_loop(
    kind: type[Task],
    plainly: bool,
    members: int,
    stop: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if plainly:
        train_plainly(monkeypatch)
    task = kind()
    all_trials = [trial(b, weight=OVERFLOWS if b % 2 else 1.0) for b in range(4)][-members:]
    if stop is not None:
        work(task, tmp_path, [Member(one, 0, EPOCHS) for one in all_trials], StopsAfter(stop + 2))
    reports = work(task, tmp_path, [Member(one, 0, EPOCHS) for one in all_trials])
    assert {report.state for report in reports if report.epoch == EPOCHS} == {TrialState.PAUSED}
    assert not [record for record in caplog.records if record.name.startswith("shoal") and record.levelname != "INFO"]
    for one in all_trials:
        found = load_newest(tmp_path, one.number)
        assert found is not None
        weights, scaler = plain(task, one)
        torch.testing.assert_close({**found.model, **found.average}, weights, rtol=ROUNDING, atol=ROUNDING)
        assert {each.dtype for each in found.model.values()} == {torch.float32}
        assert found.scaler == scaler
        torch.amp.GradScaler("cpu").load_state_dict(found.scaler)
        assert (scaler["scale"] < 2.0**16) is (one.config["weight"] == OVERFLOWS)


class AllHard(Half):
    """Has only hard samples, and twenty steps per epoch."""

    def steps_per_epoch(self, config: Any) -> int | None:
        return 20

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, (batch[0], batch[1], torch.ones_like(batch[2])))


@pytest.mark.parametrize("plainly", [False, True], ids=["fused", "plain"])
def test_a_trial_that_overflows_in_every_step_fails_in_words(
    plainly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plainly:
        train_plainly(monkeypatch)
    chosen = [trial(0), trial(1, weight=1e30), trial(2)]
    reports = work(AllHard(), tmp_path, [Member(one, 0, 3) for one in chosen])
    (failed,) = (report for report in reports if report.state is TrialState.FAILED)
    assert (failed.trial, failed.epoch) == (1, 2)
    assert failed.reason.startswith(
        "float16 overflow in step after step: the loss scale fell below 2**-14 at step 11 of epoch 2; "
    )
    assert 'return "bf16-mixed" or "32" from the task\'s `precision`' in failed.reason
    assert {report.trial for report in reports if report.state is TrialState.PAUSED} == {0, 2}


class Spikes(Half):
    """Has an infinite loss with infinite gradients for a batch with the hard sample at weights like 2**100."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) * torch.where(batch[2].any(), model.weight, 1.0)


@pytest.mark.parametrize("members", [1, 3])
def test_an_infinite_loss_whose_step_is_left_out_fails_no_trial(members: int, tmp_path: Path) -> None:
    chosen = [trial(b, weight=2.0**100) for b in range(members)]
    reports = work(Spikes(), tmp_path, [Member(one, 0, 2) for one in chosen])
    assert [report.state for report in reports if report.epoch == 2] == [TrialState.PAUSED] * members
    for one in chosen:
        found = load_newest(tmp_path, one.number)
        assert found is not None
        assert found.scaler is not None
        assert found.scaler["scale"] == 2.0**14


class Blind(Half):
    """Has an infinite loss with finite gradients, so its step is taken."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) + torch.where(model.weight > 1, torch.inf, 0.0)


def test_an_infinite_loss_whose_step_is_taken_fails_the_trial(tmp_path: Path) -> None:
    chosen = [trial(0), trial(1, weight=1.5)]
    reports = {report.trial: report for report in work(Blind(), tmp_path, [Member(one, 0, 1) for one in chosen])}
    assert reports[0].state is TrialState.PAUSED
    assert reports[1].reason == "loss is not finite at step 1 of epoch 1"


def test_a_copied_trial_goes_on_with_the_scale_that_it_copies(tmp_path: Path) -> None:
    work(Half(), tmp_path, [Member(trial(0, weight=OVERFLOWS), 0, 1)])
    first = load_newest(tmp_path, 0)
    copier = replace(trial(1), origin=Origin(0, 1))
    copy_checkpoint(tmp_path, copier)
    work(Half(), tmp_path, [Member(copier, 1, 2)])
    found = load_newest(tmp_path, 1)
    assert first is not None
    assert first.scaler is not None
    assert found is not None
    assert found.scaler == {**first.scaler, "_growth_tracker": first.scaler["_growth_tracker"] + 3}


def member(number: int, start: int, target: int = EPOCHS) -> Member:
    """A trial of which the odd ones overflow."""
    return Member(trial(number, weight=OVERFLOWS if number % 2 else 1.0), start, target)


def joining(*members: Member) -> JobUpdate:
    return JobUpdate(join=(Array(FusionKey("net", "data", SIZE), members),))


MOVES: dict[str, list[tuple[list[Member], dict[int, JobUpdate | None], str]]] = {
    "neighbours leave after an epoch": [
        ([member(0, 0), member(1, 0, 1), member(2, 0, 1)], {}, ""),
        ([member(1, 1), member(2, 1)], {}, ""),
    ],
    "a neighbour is told to leave": [
        ([member(0, 0), member(1, 0), member(2, 0)], {5: JobUpdate(leave=frozenset({1}))}, ""),
        ([member(1, 1)], {}, ""),
    ],
    "others join at another epoch": [([member(0, 0)], {4: joining(member(1, 0)), 6: joining(member(2, 0))}, "")],
    "one that has trained joins": [([member(1, 0, 1)], {}, ""), ([member(0, 0)], {4: joining(member(1, 1))}, "")],
    "from array to array": [
        ([member(0, 0, 1), member(1, 0, 1)], {}, ""),
        ([member(1, 1, 2), member(2, 0, 1), member(3, 0, 1)], {}, ""),
        ([member(3, 1), member(0, 1), member(1, 2), member(2, 1)], {}, ""),
    ],
    "suspended within an epoch, and resumed with another": [
        ([member(0, 0), member(1, 0)], {6: None}, ""),
        ([member(1, 1), member(2, 0)], {}, ""),
        ([member(0, 1)], {}, ""),
    ],
    "out of an array and back": [
        ([member(0, 0, 1), member(1, 0, 1)], {}, ""),
        ([member(0, 1, 2), member(1, 1, 2)], {}, "plain"),
        ([member(1, 2), member(0, 2)], {}, ""),
    ],
}
"""Move -> jobs one after the other: members, changes by step, and "plain" for plain PyTorch."""


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("process", ["same process", "other process"])
@pytest.mark.parametrize("jobs", MOVES.values(), ids=MOVES)
def test_a_scale_goes_with_its_trial(
    jobs: Sequence[tuple[Sequence[Member], Mapping[int, JobUpdate | None], str]],
    process: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, moved = TrialCache(), {}
    for members, plan, kind in jobs:
        with monkeypatch.context() as patch:
            if kind == "plain":
                train_plainly(patch)
            cache = cache if process == "same process" else TrialCache()
            work(Half(), tmp_path, members, Planned(plan), cache)
        later = [one for change in plan.values() if change for array in change.join for one in array.members]
        moved |= {one.trial.number: one.trial for one in (*members, *later)}
    for one in moved.values():
        found = load_newest(tmp_path, one.number)
        assert found is not None
        weights, scaler = plain(Half(), one)
        assert (found.epoch, found.scaler) == (EPOCHS, scaler)
        torch.testing.assert_close(found.model, weights, rtol=ROUNDING, atol=ROUNDING)


def test_a_checkpoint_of_another_precision_begins_a_scale(tmp_path: Path) -> None:
    class Full(Half):
        def precision(self, config: Any) -> str:
            return "32"

        def loss(self, model: Any, batch: Any) -> Tensor:
            return (model(batch[0]) - batch[1]).square().mean()

    work(Full(), tmp_path, [Member(trial(0), 0, 1)])
    full = load_newest(tmp_path, 0)
    assert full is not None
    assert full.scaler is None
    work(Half(), tmp_path, [Member(trial(0), 1, 2)])
    found = load_newest(tmp_path, 0)
    assert found is not None
    assert found.scaler == {**torch.amp.GradScaler("cpu").state_dict(), "_growth_tracker": 3}


def test_weights_in_float16_are_refused() -> None:
    class Narrow(Half):
        def model(self, config: Any) -> nn.Module:
            return super().model(config).half()

    with pytest.raises(TaskError, match=r"'layers\.0\.weight' is float16, .* return model\.float\(\)"):
        runtimes(Narrow(), [trial(0)])


class Draws(torch.optim.SGD):
    """Draws a number per member, which is detected only after the step."""

    def step(self, closure: Any = None) -> Any:
        random.random()
        return super().step(closure)


class DrawsInSteps(Half):
    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return Draws(model.parameters(), lr=config["lr"])


class Metrics(Half):
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        out = model(batch[0])
        assert out.dtype == torch.float16
        return {"error": (out - batch[1]).abs().mean()}


def test_validation_runs_in_float16(tmp_path: Path) -> None:
    reports = work(Metrics(), tmp_path, [Member(trial(b), 0, 1) for b in range(2)])
    for report in reports:
        found = load_newest(tmp_path, report.trial)
        assert found is not None
        model = Weighted(1.0)
        model.load_state_dict(found.model)
        error = float((model(X[:6].float()) - Y[:6].float()).abs().mean().detach())
        assert report.metrics["error"] == pytest.approx(error, rel=ROUNDING)
