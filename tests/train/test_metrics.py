"""Values that `metrics` may return, with names that some batches lack, and values that are refused."""

import logging
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_samples import Small, X, Y, runtimes, search, trial
from torch import Tensor, nn

import shoal
from shoal.core.errors import TaskError
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.look.snapshot import snapshot
from shoal.look.text import best_text, metric_text
from shoal.task import Task
from shoal.train.fused_stepper import FusedStepper
from shoal.train.metrics import MetricMeans
from shoal.train.stepper import PlainStepper, Stepper

BATCHES = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
"""Of 4, 4 and 2 samples."""


class ByBatch(Small):
    """Has a metric only for batches whose first number is positive, as for a class that does not occur in all."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        found = dict(super().metrics(model, batch))
        if batch[0][0, 0] > 0:
            found["seldom"] = model(batch[0]).sum()
        return found


class NumberOrTensor(Small):
    """Has a metric that is a Python number for some batches, as after an early return, and a tensor for others."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {**super().metrics(model, batch), "mixed": 0.25 if batch[0][0, 0] > 0 else model(batch[0]).mean()}


class ByMember(Small):
    """Has a metric that a trial leaves out depending on the output of its model."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        found = dict(super().metrics(model, batch))
        mean = model(batch[0]).mean()
        if mean.item() > 0:
            found["positive"] = mean
        return found


def steppers(task: Task, count: int) -> list[Stepper]:
    trials = [trial(b) for b in range(count)]
    return [FusedStepper(task, runtimes(task, trials)), PlainStepper(task, runtimes(task, trials))]


def expected(task: Task, model: nn.Module) -> dict[str, float]:
    """Compute the means over the samples of the batches that have each metric."""
    sums: dict[str, tuple[float, int]] = {}
    with torch.no_grad():
        for batch in BATCHES:
            for name, value in {"valid_loss": task.loss(model, batch), **task.metrics(model, batch)}.items():
                total, samples = sums.get(name, (0.0, 0))
                sums[name] = total + float(value) * len(batch[0]), samples + len(batch[0])
    return {name: total / samples for name, (total, samples) in sums.items()}


@pytest.mark.parametrize("kind", [ByBatch, ByMember, NumberOrTensor], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("count", [1, 5])
def test_a_mean_is_over_the_batches_that_have_the_name(
    kind: type[Task], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    task = kind()
    names = set()
    for stepper in steppers(task, count):
        found = stepper.validate(BATCHES)
        for runtime, metrics in zip(stepper.runtimes, found, strict=True):
            assert metrics == pytest.approx(expected(task, runtime.model), rel=1e-9)
            names.add(tuple(metrics))
    assert kind is not ByMember or count == 1 or len(names) > 1, "members leave out different names"


def test_a_metric_may_be_one_tensor_that_changes_with_each_batch() -> None:
    means, value = MetricMeans(1), torch.zeros((), dtype=torch.float64)
    for number, size in ((1.0, 2), (4.0, 4)):
        means.add_each([{"seen": value.fill_(number)}], size)
    assert means.per_trial() == [{"seen": 3.0}]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0.5], "must return a mapping of names to scalars, such as {'accuracy': accuracy}, got list; return {}"),
        (torch.tensor(0.5), "must return a mapping .* got a tensor"),
        (None, "must return a mapping .* got NoneType; return {} if there are none"),
        ({"error": "low"}, "metric 'error' must be a scalar tensor or a number, got 'low'"),
        ({"error": None}, "metric 'error' must be a scalar tensor or a number, got None"),
        ({"error": 10**400}, "the metric 'error' is an integer too large for a float; report its logarithm"),
        ({"error": torch.zeros(3)}, r"'error' must be a real scalar tensor, got torch.float32 of shape \(3,\)"),
        ({"valid_loss": 1.0}, "must not return 'valid_loss'"),
    ],
    ids=lambda value: reprlib.repr(value),
)
def test_anything_else_is_refused_in_words(returned: Any, message: str) -> None:
    class Odd(Small):
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return returned

    for count in (1, 3):
        for stepper in steppers(Odd(), count):
            with pytest.raises(TaskError, match=message):
                stepper.validate(BATCHES)


@pytest.mark.parametrize("value", [1, 10**30, 0.1, True, np.float32(0.5), np.int64(2), torch.tensor(3)], ids=repr)
def test_numbers_of_any_kind_are_metrics(value: Any) -> None:
    class Number(Small):
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"number": value}

    for stepper in steppers(Number(), 2):
        assert [metrics["number"] for metrics in stepper.validate(BATCHES)] == [float(value)] * 2


class Misnamed(Small):
    """Returns a number as the name of a metric in trial 1."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("number", torch.tensor(float(config["number"])))
        return model

    def metrics(self, model: Any, batch: Any) -> Any:
        found: dict[Any, Tensor] = dict(super().metrics(model, batch))
        return {**found, 3: found["error"]} if model.number.item() == 1 else found


def test_a_search_in_which_one_trial_misnames_goes_on(tmp_path: Path) -> None:
    space = {"lr": 0.1, "number": shoal.choice([0, 1, 2])}
    study = search(Misnamed(), space, tmp_path / "study", metric="error", algorithm=shoal.Grid(epochs=2))
    assert [row.state for row in study.trials] == [TrialState.COMPLETE, TrialState.FAILED, TrialState.COMPLETE]
    assert study.trials[1].reason == "at epoch 1 a metric is named 3; names must be strings, such as '3'"
    assert sorted(study.trials[1].metrics) == ["error", "valid_loss"]
    assert shoal.resume(study.directory).best_trial.number != 1


class NoNumber(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        return {"error": torch.tensor(float("nan"))}


def test_a_metric_that_was_never_a_number_is_said_to_be_that(tmp_path: Path) -> None:
    space = {"lr": shoal.loguniform(0.01, 0.1)}
    study = search(NoNumber(), space, tmp_path / "study", metric="error", algorithm=shoal.Random(2, epochs=2))
    with JournalView.read(study.directory) as journal:
        assert best_text(snapshot(journal, 0.0)) == "– (all reported values of error are NaN)"
    with pytest.raises(shoal.ShoalError, match="has a value of 'error': all that were reported are NaN"):
        study.best_trial  # noqa: B018


@pytest.mark.parametrize(
    ("batches", "error"),
    [
        pytest.param([(1.0, 4), (3.0, 4)], 1.0, id="two batches"),  # a sample's variance 8, of 8 samples
        pytest.param([(1.0, 6), (3.0, 2)], math.sqrt(6 * 0.25 + 2 * 2.25) / math.sqrt(8), id="by their sizes"),
        pytest.param([(2.0, 1)] * 5, 0.0, id="no spread"),
        pytest.param([(2.0, 9)], None, id="one batch"),
        pytest.param([(2.0, 1), (math.nan, 1)], None, id="nan"),
        pytest.param([(1e200, 1), (-1e200, 1)], None, id="beyond all numbers"),
    ],
)
def test_the_standard_error_of_a_mean_is_that_of_its_batches(
    batches: list[tuple[float, int]], error: float | None
) -> None:
    means = MetricMeans(2)
    for value, size in batches:
        means.add({"loss": torch.tensor([value, 0.0], dtype=torch.float64)}, size)
    (_, errors), (_, others) = means.with_errors()
    assert errors.get("loss") == (None if error is None else pytest.approx(error, rel=1e-12))
    assert others == ({"loss": 0.0} if len(batches) > 1 else {})


def test_standard_errors_of_single_samples_are_those_of_statistics() -> None:
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means = MetricMeans(1)
    for value in values:
        means.add({"loss": value.view(1)}, 1)
    ((_, errors),) = means.with_errors()
    assert errors["loss"] == pytest.approx(float(values.std()) / math.sqrt(50), rel=1e-12)


@pytest.mark.parametrize("rank_by", ["best", "last"])
def test_a_trial_shows_the_error_of_the_value_that_ranks_it(rank_by: str, tmp_path: Path) -> None:
    study = search(
        Small(), {"lr": 0.3, "number": 0}, tmp_path / "study", algorithm=shoal.Random(2, epochs=4), rank_by=rank_by
    )
    for row in study.trials:
        model = study.model(row.number, which="best" if rank_by == "best" else "last")
        losses = [(model(x) - y).square().mean().item() for x, y in zip(X[:6].split(4), Y[:6].split(4), strict=True)]
        mean = (4 * losses[0] + 2 * losses[1]) / 6
        assert row.ranked["valid_loss"] == pytest.approx(mean, rel=1e-9)
        spread = 4 * (losses[0] - mean) ** 2 + 2 * (losses[1] - mean) ** 2
        assert row.errors["valid_loss"] == pytest.approx(math.sqrt(spread / 6), rel=1e-9)
        assert row.errors.keys() == {"valid_loss", "error"}
        assert metric_text(row, "valid_loss") == f"{mean:.4g} ± {math.sqrt(spread / 6):.2g}"
