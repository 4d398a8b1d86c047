"""A trial that draws random numbers, from its first step on or later, trains in an array as it does alone."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pack_samples import CPU, EPOCHS, Mixed, Shop, reports_in, trial, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.core.array import Array, Member
from shoal.train.checkpoint import load_newest
from shoal.train.data.datasets import DataSets
from shoal.train.profile import measure
from shoal.train.worker_state import TrialCache, WorkerState

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand((), dtype=torch.float64),
    "Python": random.random,
    "NumPy": np.random.rand,
}


class DrawsFrom(Mixed):
    """A loss that is disturbed once a model has done so many steps.

    Args:
        generator: a key of `DRAWS`.
        first: the step of which numbers are used.
        always: they are drawn at all other steps as well.
    """

    def __init__(self, generator: str, first: int, always: bool) -> None:
        self.draw = DRAWS[generator]
        self.first = first
        self.always = always

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        with torch.no_grad():
            model.steps.add_(1)
        late = model.steps.item() >= self.first
        if late or self.always:
            loss = loss * (1 + 0.5 * late * self.draw())
        return loss


class Refuses(DrawsFrom):
    """Raises where a number is drawn that it has not been told of.

    Args:
        told: numbers that are right; None: it takes down those that it draws.
    """

    def __init__(self, first: int, told: set[float] | None = None) -> None:
        super().__init__("Python", first, always=told is None)
        self.numbers = set() if told is None else told
        self.draw = self.draw_checked

    def draw_checked(self) -> float:
        number = random.random()
        if self.always:
            self.numbers.add(number)
        elif number not in self.numbers:
            raise ValueError(f"{number} should not have been drawn")
        return number


class FirstAlone(DrawsFrom):
    """Draws only for the first member of an array, late in training."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return Mixed.loss(self, model, batch) if model.which.item() else super().loss(model, batch)

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("which", torch.tensor(float(config["lr"] > 0.01)))
        return model


class Counts(DrawsFrom):
    """Counts its steps in an attribute and in a list."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.count, model.counted = 0, []
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        model.count += 1
        model.counted.append(model.count)
        return loss * (1 + 0.01 * model.count + 0.01 * len(model.counted))


def learnt(task: Mixed, numbers: list[int], directory: Path, seconds: float) -> dict[tuple[int, int], Any]:
    """Return all reports, and the final weights as a report of epoch 0."""
    reports = reports_in(Shop(task, directory).run([whole(number) for number in numbers], seconds=seconds))
    found: dict[tuple[int, int], Any] = {(report.trial, report.epoch): report.metrics for report in reports}
    for number in numbers:
        checkpoint = load_newest(directory, number)
        assert checkpoint is not None
        assert checkpoint.epoch == EPOCHS
        found[number, 0] = {name: tensor.clone() for name, tensor in checkpoint.model.items()}
    return found


def same(got: dict[tuple[int, int], Any], wanted: dict[tuple[int, int], Any]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


COMPANIES = {"a lone trial": [0], "an array": [0, 1], "a pack": [0, 2, 3, 4]}


@pytest.mark.in_turns
@pytest.mark.parametrize("first", [4, 8, 9, 16], ids=lambda first: f"from step {first}")
@pytest.mark.parametrize("seconds", [30.0, 0.0], ids=["few checkpoints", "many"])
@pytest.mark.parametrize("numbers", COMPANIES.values(), ids=COMPANIES)
@pytest.mark.parametrize("generator", DRAWS)
def test_who_begins_to_draw_late_learns_the_same(
    generator: str, numbers: list[int], seconds: float, first: int, tmp_path: Path
) -> None:
    wanted = learnt(DrawsFrom(generator, first, always=True), numbers, tmp_path / "always", seconds)
    got = learnt(DrawsFrom(generator, first, always=False), numbers, tmp_path / "late", seconds)
    same(got, wanted)


def test_numbers_are_right_in_the_very_step_that_begins_to_draw(tmp_path: Path) -> None:
    wanted = learnt(always := Refuses(9), [0], tmp_path / "always", 30.0)
    got = learnt(Refuses(9, always.numbers), [0], tmp_path / "late", 30.0)
    same(got, wanted)


@pytest.mark.parametrize("generator", ["Python", "NumPy"])
def test_draws_of_the_first_member_are_not_hidden_by_those_of_the_others(generator: str, tmp_path: Path) -> None:
    wanted = learnt(FirstAlone(generator, 9, always=True), [0, 1], tmp_path / "always", 30.0)
    got = learnt(FirstAlone(generator, 9, always=False), [0, 1], tmp_path / "late", 30.0)
    same(got, wanted)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("first", [4, 9])
@pytest.mark.parametrize("numbers", [[0], [0, 1]], ids=["a lone trial", "an array"])
@pytest.mark.parametrize("generator", DRAWS)
def test_who_counts_in_an_attribute_and_begins_to_draw_late_learns_the_same(
    generator: str, numbers: list[int], first: int, tmp_path: Path
) -> None:
    wanted = learnt(Counts(generator, first, always=True), numbers, tmp_path / "always", 30.0)
    got = learnt(Counts(generator, first, always=False), numbers, tmp_path / "late", 30.0)
    same(got, wanted)


def test_a_process_does_not_try_again_what_has_begun_to_draw(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(DrawsFrom("torch", 4, always=False), tmp_path)
    for epochs in range(1, EPOCHS + 1):
        shop.run([Member(trial(0), epochs - 1, epochs)])
    assert caplog.text.count("go back to their checkpoints") == 1


def blind(x: Tensor) -> Tensor:
    """Return noise whose draw Python cannot detect."""
    return x * (1 + 0.1 * torch.rand_like(x))


class DrawsUnseen(DrawsFrom):
    """Draws from torch's own generator within a script."""

    def __init__(self, first: int) -> None:
        super().__init__("torch", first, always=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            noise = torch.jit.trace(blind, torch.ones((), dtype=torch.float64), check_trace=False)
        self.draw = lambda: noise(torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("first", [0, 9])
def test_what_torch_draws_unseen_is_one_for_all(first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    together = learnt(DrawsUnseen(first), [0, 1], tmp_path / "together", 30.0)
    assert first or "go back" not in caplog.text
    for number in (0, 1):
        alone = learnt(DrawsUnseen(first), [number], tmp_path / f"alone {number}", 30.0)
        same({key: value for key, value in together.items() if key[0] == number}, alone)


@pytest.mark.parametrize("generator", ["Python", "NumPy"])
def test_epochs_of_what_draws_are_known_not_to_mix(generator: str, tmp_path: Path) -> None:
    def mixing(first: int) -> float | None:
        task = DrawsFrom(generator, first, always=False)
        sets = DataSets(task, CPU)
        key = Shop(task, tmp_path).key(0)
        array = Array(key, tuple(whole(number, 100) for number in (0, 1)))
        return measure(WorkerState(task, sets, TrialCache(), CPU, tmp_path), array, 2**33).mixing

    assert mixing(1) is None
    assert mixing(10**9) is not None


class PartlyCheckpointed(Mixed):
    """Has dropout under a re-entrant checkpoint with rate 0 in some trials, next to another dropout."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.rate = 0.2 if config["lr"] > 0.01 else 0.0
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        hidden = checkpoint(lambda x: F.dropout(model[0](x), model.rate), x, use_reentrant=True)
        return F.cross_entropy(model[2](F.dropout(hidden, 0.1)), batch[1])


def test_who_cannot_draw_its_own_numbers_changes_nobody_elses(tmp_path: Path) -> None:
    together = learnt(PartlyCheckpointed(), [0, 1], tmp_path / "together", 30.0)
    for number in (0, 1):
        alone = learnt(PartlyCheckpointed(), [number], tmp_path / f"alone {number}", 30.0)
        same({key: value for key, value in together.items() if key[0] == number}, alone)


class Unshaped(Mixed):
    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3)).double()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


def test_parameters_that_have_no_shape_yet_are_trained(tmp_path: Path) -> None:
    study = shoal.tune(
        Unshaped(),
        {"lr": shoal.grid([0.01, 0.02]), "optimizer": "Adam", "batch_size": 2},
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Grid(epochs=2),
        directory=tmp_path / "study",
        backend="inline",
        show_progress=False,
    )
    assert [row.state.value for row in study.trials] == ["complete"] * 2
