"""LR schedulers that step after each training step: as in a plain loop, alone, fused, resumed and after a copied
checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SAMPLES, SIZE, Small, StopsAfter, X, Y, runtimes, trial, work
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

import shoal
from shoal.core.array import Member
from shoal.core.errors import CheckpointError, TaskError
from shoal.core.trial import Origin, Trial
from shoal.fuse.generators import seed_all
from shoal.task import Task
from shoal.train.checkpoint import load_newest
from shoal.train.checkpoint_paths import copy_checkpoint
from shoal.train.data.loader import epoch_order
from shoal.train.worker_state import TrialCache

EPOCHS, STEPS = 3, 3


class ByStep(Small):
    """Has schedules of several kinds, the first with two schedulers for one optimizer."""

    scheduler_interval = "step"

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        match config["number"] % 4:
            case 0:
                warm = LinearLR(optimizer, start_factor=0.1, total_iters=4)
                return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, 5)], milestones=[4])
            case 1:
                return OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * STEPS)
            case 2:
                return LambdaLR(optimizer, lambda step: 1 / (1 + step))
            case _:
                return None


class OwnStep(ByStep):
    """Overrides `step`, which can be fused."""

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss


class OneByOne(ByStep):
    """Overrides `step`, which cannot be fused."""

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        assert optimizer.param_groups
        return super().step(model, batch, optimizer)


class Apart(ByStep):
    """Has trials that train in plain PyTorch."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 if super().loss(model, batch).item() else 0)


class Two(OwnStep):
    """Has several optimizers, each with a schedule."""

    def optimizer(self, model: Any, config: Any) -> Any:
        return {
            "head": torch.optim.SGD(model[2:].parameters(), config["lr"]),
            "body": super().optimizer(model[:2], config),
        }

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return [LinearLR(optimizer["head"], 0.5, total_iters=3), super().scheduler(optimizer["body"], config)]

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        for one in optimizer.values():
            one.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        for one in optimizer.values():
            one.step()
        return loss


def flat(given: Any) -> list[Any]:
    values = given.values() if isinstance(given, dict) else given if isinstance(given, list) else [given]
    return [value for value in values if value is not None]


def plain(task: Task, one: Trial, epochs: int = EPOCHS) -> dict[str, Tensor]:
    """Return the weights after a plain loop."""
    seed_all(one.seed, CPU)
    model = task.model(one.config)
    optimizer = task.optimizer(model, one.config)
    schedulers = flat(task.scheduler(optimizer, one.config))
    for epoch in range(epochs):
        for rows in epoch_order(SAMPLES, one.data_seed, epoch).split(SIZE):
            for each in flat(optimizer):
                each.zero_grad()
            task.loss(model, (X[rows], Y[rows])).backward()
            for each in flat(optimizer):
                each.step()
            for scheduler in schedulers:
                scheduler.step()
    return model.state_dict()


def check(task: Task, directory: Path, trials: list[Trial]) -> None:
    for one in trials:
        found = load_newest(directory, one.number)
        assert found is not None
        assert (found.epoch, found.step) == (EPOCHS, 0)
        torch.testing.assert_close(found.model, plain(task, one), rtol=1e-9, atol=1e-12)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", [ByStep, OwnStep, OneByOne, Apart, Two], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("stop", [None, 5], ids=["in one go", "stopped within an epoch"])
def test_weights_equal_those_of_a_plain_loop(kind: type[Task], members: int, stop: int | None, tmp_path: Path) -> None:
    trials = [trial(b) for b in range(members)]
    task = kind()
    if stop is not None:
        again = int(kind in (OneByOne, Apart) and members > 1)  # the first step is taken twice
        work(task, tmp_path, [Member(one, 0, EPOCHS) for one in trials], StopsAfter(stop + 2 + again))
        found = load_newest(tmp_path, 0)
        assert found is not None
        assert 0 < found.step < STEPS, "it was stopped within an epoch"
    work(task, tmp_path, [Member(one, 0, EPOCHS) for one in trials])
    check(task, tmp_path, trials)


def test_who_pauses_in_this_process_goes_on_where_its_schedule_was(tmp_path: Path) -> None:
    task, trials, trial_cache = ByStep(), [trial(b) for b in range(3)], TrialCache()
    work(task, tmp_path, [Member(one, 0, 1) for one in trials], trial_cache=trial_cache)
    work(task, tmp_path, [Member(one, 1, EPOCHS) for one in trials], trial_cache=trial_cache)
    check(task, tmp_path, trials)


def test_a_trial_that_takes_over_weights_has_the_schedule_of_its_own_steps(tmp_path: Path) -> None:
    """The scheduler is where it would be if the trial had trained from its start, with its own learning rate."""
    task, source = ByStep(), trial(0)
    work(task, tmp_path, [Member(source, 0, 2)])
    follower = Trial(2, {"lr": 0.05, "number": 2}, seed=5, data_seed=7, origin=Origin(0, 2))
    copy_checkpoint(tmp_path, follower)
    work(task, tmp_path, [Member(follower, 2, 3)])
    found = load_newest(tmp_path, 2)
    assert found is not None
    assert found.optimizer["param_groups"][0]["lr"] == pytest.approx(0.05 / (1 + 3 * STEPS))


def test_a_trial_that_takes_over_weights_never_begins_with_new_ones(tmp_path: Path) -> None:
    """A network file system may not show the copied checkpoint yet."""
    follower = Trial(2, {"lr": 0.05, "number": 2}, seed=5, data_seed=7, origin=Origin(0, 2))
    with pytest.raises(CheckpointError, match=r"trial 2 continues from trial 0 at epoch 2, and .* no intact"):
        work(ByStep(), tmp_path, [Member(follower, 2, 3)])
    assert load_newest(tmp_path, 2) is None


class Plateau(ByStep):
    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return [ReduceLROnPlateau(optimizer)]


def test_a_plateau_of_steps_is_refused() -> None:
    with pytest.raises(TaskError, match=r'ReduceLROnPlateau, which follows the validation loss .* set it to "epoch"'):
        runtimes(Plateau(), [trial(0)])


@pytest.mark.parametrize("value", ["batch", None, 1])
def test_another_interval_is_refused_before_there_is_a_directory(value: Any, tmp_path: Path) -> None:
    class Odd(Small):
        scheduler_interval = value

    with pytest.raises(TaskError, match=f'`scheduler_interval` of a task must be "epoch" or "step", got {value!r}'):
        shoal.tune(
            Odd(),
            {"lr": 0.1},
            metric="error",
            mode="min",
            algorithm=shoal.Random(1, epochs=1),
            backend="inline",
            directory=tmp_path / "study",
        )
    assert not (tmp_path / "study").exists()
