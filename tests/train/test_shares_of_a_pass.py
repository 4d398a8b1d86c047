"""Epochs that are shares of a pass: where they end, and that trials train as in whole passes."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SAMPLES, SIZE, Small, search, trial, work
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, TensorDataset

import shoal
from shoal.core.array import Member
from shoal.core.errors import TaskError
from shoal.core.trial import Origin
from shoal.train.checkpoint import load_newest
from shoal.train.checkpoint_paths import copy_checkpoint
from shoal.train.data.batches import Batches
from shoal.train.data.loader import LoaderSettings
from shoal.train.step_settings import StepPlan, StepSettings


def plan_of(samples: int, size: int, accumulate: int, share: float, drop_last: bool = False) -> StepPlan:
    task = type("Shared", (Small,), {
        "batch_size": lambda self, config: size,
        "accumulate": lambda self, config: accumulate,
        "steps_per_epoch": lambda self, config: share,
    })()  # fmt: skip
    settings = LoaderSettings(drop_last=drop_last)
    train, valid = (
        Batches(TensorDataset(torch.zeros(n, 1)), CPU, which, settings=settings)
        for n, which in ((samples, "training"), (100, "v"))
    )
    return StepPlan.of(task, {"number": 0}, train, valid)


@pytest.mark.parametrize(
    ("samples", "size", "accumulate", "share", "steps"),
    [
        pytest.param(100, 10, 1, 0.5, [5, 5, 5], id="halves"),
        pytest.param(25, 10, 1, 0.5, [2, 1, 2, 1], id="the last batch is smaller"),
        pytest.param(50, 4, 1, 0.4, [5, 5, 6, 5, 5], id="an epoch crosses the end of a pass"),
        pytest.param(60, 5, 2, 0.25, [2, 1, 2, 1], id="steps of two batches"),
        pytest.param(10, 1, 1, 1 / 3, [4, 3, 3, 4], id="a third"),
    ],
)
def test_an_epoch_ends_with_the_step_that_completes_its_share(
    samples: int, size: int, accumulate: int, share: float, steps: list[int]
) -> None:
    plan = plan_of(samples, size, accumulate, share)
    assert [plan.steps(epoch) for epoch in range(len(steps))] == steps
    assert plan.epoch_steps == max(steps[:2])


@given(st.integers(40, 5000), st.integers(1, 64), st.integers(1, 3), st.integers(2, 30), st.integers(0, 3))
def test_ends_of_epochs_count_samples(samples: int, size: int, accumulate: int, parts: int, passes: int) -> None:
    """After k of n epochs a trial has seen k/n of the samples, and less than a step more; after n all of them."""
    if size * accumulate * parts > samples:
        with pytest.raises(TaskError, match=rf"is less than a step of {size * accumulate}; return at least"):
            plan_of(samples, size, accumulate, 1 / parts)
        return
    plan = plan_of(samples, size, accumulate, 1 / parts)
    first = passes * parts
    seen = 0
    for epoch in range(first, first + parts):
        assert plan.steps(epoch) in (plan.epoch_steps, plan.epoch_steps - 1)
        seen += sum(plan.samples(epoch, step) for step in range(plan.steps(epoch)))
        asked = Fraction(samples * (epoch + 1 - first), parts)
        assert asked <= seen < asked + size * accumulate
        assert plan.locate(epoch, plan.steps(epoch)) == plan.locate(epoch + 1, 0)
    assert seen == samples


@given(st.integers(4, 500), st.integers(1, 64), st.integers(1, 3), st.integers(2, 30))
def test_each_epoch_has_a_step_without_dropped_samples(samples: int, size: int, accumulate: int, parts: int) -> None:
    size = min(size, samples)
    if size * accumulate * parts > samples // size * size:
        with pytest.raises(TaskError, match="is less than a step"):
            plan_of(samples, size, accumulate, 1 / parts, drop_last=True)
        return
    plan = plan_of(samples, size, accumulate, 1 / parts, drop_last=True)
    steps = [plan.steps(epoch) for epoch in range(parts)]
    assert min(steps) >= 1
    assert sum(steps) == plan.pass_steps


class Halves(Small):
    """Has epochs of two steps and of one in turn, while a pass has three."""

    def steps_per_epoch(self, config: Any) -> float | None:
        return 0.5


class StepsSchedulers(Halves):
    scheduler_interval = "step"

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def weights(directory: Path, number: int) -> dict[str, Tensor]:
    found = load_newest(directory, number)
    assert found is not None
    return dict(found.model)


@pytest.mark.parametrize("members", [1, 3])
def test_parts_of_passes_train_as_whole_passes(members: int, tmp_path: Path) -> None:
    assert SAMPLES % SIZE
    work(Small(), tmp_path / "passes", [Member(trial(b), 0, 2) for b in range(members)])
    reports = work(Halves(), tmp_path / "halves", [Member(trial(b), 0, 4) for b in range(members)])
    assert sorted({report.epoch for report in reports}) == [1, 2, 3, 4]
    for b in range(members):
        mine, whole = weights(tmp_path / "halves", b), weights(tmp_path / "passes", b)
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-12)


def test_trials_at_epochs_of_different_lengths_train_as_alone(tmp_path: Path) -> None:
    work(Halves(), tmp_path / "one", [Member(trial(0), 0, 1)])
    work(Halves(), tmp_path / "one", [Member(trial(0), 1, 4), Member(trial(1), 0, 4), Member(trial(2), 0, 2)])
    work(Small(), tmp_path / "passes", [Member(trial(0), 0, 2), Member(trial(1), 0, 2), Member(trial(2), 0, 1)])
    for b in range(3):
        mine, whole = weights(tmp_path / "one", b), weights(tmp_path / "passes", b)
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-12)


def test_a_copy_has_the_schedule_of_the_steps_of_its_epochs(tmp_path: Path) -> None:
    work(StepsSchedulers(), tmp_path, [Member(trial(0), 0, 3)])
    copier = replace(trial(1), origin=Origin(0, 3))
    copy_checkpoint(tmp_path, copier)
    work(StepsSchedulers(), tmp_path, [Member(copier, 3, 5)])
    found = load_newest(tmp_path, 1)
    assert found is not None
    assert found.scheduler["last_epoch"] == 2 + 1 + 2 + 1 + 2


def test_a_share_is_part_of_what_members_of_an_array_agree_in() -> None:
    settings = [StepSettings.of(task(), {"number": 0}).of_structure(False) for task in (Small, Halves)]
    assert settings[0] != settings[1]
    assert settings[1][-1] == Fraction(1, 2)


class Endless(Small):
    def data(self, config: Any) -> Any:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(TensorDataset(*sets[0].tensors))

        sets = super().data(config)
        return Stream(), sets[1]

    def steps_per_epoch(self, config: Any) -> float | None:
        return 0.5


def test_a_share_of_an_endless_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the training set is iterable and has no length"):
        search(Endless(), {"lr": 0.1, "number": 0}, tmp_path / "study", algorithm=shoal.Random(1, epochs=1))
