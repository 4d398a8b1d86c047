"""Gradient accumulation, clipping, precision, weight averages and epochs of a number of steps equal a plain loop."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SAMPLES, SIZE, Small, StopsAfter, X, Y, runtimes, save, search, trial, work
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import shoal
from shoal.core.array import Member
from shoal.core.errors import TaskError
from shoal.core.trial import Origin, Trial, TrialState
from shoal.fuse.generators import seed_all
from shoal.task import Task
from shoal.train import worker_state
from shoal.train.array_trainer import update_averages
from shoal.train.checkpoint import load_newest, load_weights
from shoal.train.checkpoint_paths import copy_checkpoint
from shoal.train.data.batches import Batches
from shoal.train.data.loader import LoaderSettings, epoch_order
from shoal.train.step_settings import StepPlan, StepSettings
from shoal.train.worker_state import TrialCache

EPOCHS = 3


class Accumulates(Small):
    """Takes two batches per step; with 3 batches in a pass, the last step has one."""

    def accumulate(self, config: Any) -> int:
        return 2


class Clips(Small):
    """Limits the gradient norm of every other trial, each by its own value."""

    def clip_norm(self, config: Any) -> float | None:
        return None if config["number"] % 2 else 0.1 * (1 + config["number"])


class Averages(Small):
    """Averages the weights of every other trial, each with its own decay."""

    def ema(self, config: Any) -> float | None:
        return None if config["number"] % 2 else 0.5 + 0.1 * config["number"]


class CountsSteps(Small):
    """Has epochs of two steps, while a pass has three."""

    def steps_per_epoch(self, config: Any) -> int | None:
        return 2


class All(Accumulates, Clips, Averages):
    """Combines all settings with a schedule of steps; a pass has two steps, an epoch three."""

    scheduler_interval = "step"

    def steps_per_epoch(self, config: Any) -> int | None:
        return 3

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Plainly(All):
    """Has trials that train in plain PyTorch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 if super().loss(model, batch).item() else 0)


def plain(task: Task, one: Trial, epochs: int = EPOCHS) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights, averaged if asked for, and the validation losses of a plain loop."""
    seed_all(one.seed, CPU)
    model = task.model(one.config)
    optimizer = task.optimizer(model, one.config)
    scheduler = task.scheduler(optimizer, one.config)
    norm, decay = task.clip_norm(one.config), task.ema(one.config)
    average: dict[str, Tensor] = {}
    losses = []
    steps = (step for number in range(99) for step in passes(task, one, number))
    for _ in range(epochs):
        for _ in range(task.steps_per_epoch(one.config) or len(list(passes(task, one, 0)))):
            groups = next(steps)
            optimizer.zero_grad()
            for rows in groups:
                loss = (model(X[rows]) - Y[rows]).square().mean() * len(rows) / sum(map(len, groups))
                loss.backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            for name, each in model.named_parameters() if decay is not None else ():
                now = each.detach().clone()
                average[name] = decay * average[name] + (1 - decay) * now if name in average else now
        with torch.no_grad():
            x = torch.func.functional_call(model, average, X[:6])
            losses.append(float((x - Y[:6]).square().mean()))
    return {**model.state_dict(), **average}, losses


def passes(task: Task, one: Trial, number: int) -> list[tuple[Tensor, ...]]:
    batches = epoch_order(SAMPLES, one.data_seed, number).split(SIZE)
    size = task.accumulate(one.config)
    return [batches[first : first + size] for first in range(0, len(batches), size)]


KINDS = [Accumulates, Clips, Averages, CountsSteps, All, Plainly]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("stop", [None, 4], ids=["in one go", "stopped within an epoch"])
def test_weights_equal_those_of_a_plain_loop(kind: type[Task], members: int, stop: int | None, tmp_path: Path) -> None:
    task, trials = kind(), [trial(b) for b in range(members)]
    reports = []
    if stop is not None:
        reports += work(task, tmp_path, [Member(one, 0, EPOCHS) for one in trials], StopsAfter(stop + 2))
    reports += work(task, tmp_path, [Member(one, 0, EPOCHS) for one in trials])
    for one in trials:
        found = load_newest(tmp_path, one.number)
        assert found is not None
        weights, losses = plain(task, one)
        torch.testing.assert_close({**found.model, **found.average}, weights, rtol=1e-9, atol=1e-12)
        mine = {report.epoch: report.metrics["valid_loss"] for report in reports if report.trial == one.number}
        assert [mine[epoch] for epoch in range(1, EPOCHS + 1)] == pytest.approx(losses, rel=1e-9)


class Mixed(Small):
    def model(self, config: Any) -> nn.Module:
        return super().model(config).float()

    def data(self, config: Any) -> Any:
        sets = super().data(config)
        return tuple(torch.utils.data.TensorDataset(*(x.float() for x in one.tensors)) for one in sets)

    def precision(self, config: Any) -> str:
        return "bf16-mixed"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        assert out.dtype == torch.bfloat16
        return (out.float() - batch[1]).square().mean()


@pytest.mark.parametrize("members", [1, 3])
def test_mixed_precision_keeps_float32_weights(members: int, tmp_path: Path) -> None:
    work(Mixed(), tmp_path, [Member(trial(b), 0, 2) for b in range(members)])
    for b in range(members):
        found = load_newest(tmp_path, b)
        assert found is not None
        assert {each.dtype for each in found.model.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("device", "capability", "precision"),
    [("cuda:1", (9, 0), "bf16-mixed"), ("cuda:1", (7, 5), "32"), ("cpu", None, "32"), ("mps", None, "32")],
)
def test_automatic_precision_is_that_of_the_device(
    device: str, capability: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Automatic(Small):
        def precision(self, config: Any) -> str:
            return "auto"

    monkeypatch.setattr(torch.cuda, "get_device_capability", {torch.device("cuda:1"): capability}.get)
    settings = StepSettings.of(Automatic(), {})
    assert settings.on(torch.device(device)) == replace(settings, precision=precision)
    assert StepSettings.of(Small(), {}).on(torch.device("cuda:1")).precision == "32"


def test_trials_of_different_precision_are_different_arrays() -> None:
    class Either(Mixed):
        def precision(self, config: Any) -> str:
            return config["precision"]

    full, mixed = (StepSettings.of(Either(), {"precision": each}) for each in ("32", "bf16-mixed"))
    assert full.of_structure(False) != mixed.of_structure(False)


class Scores(Small):
    """Computes the largest error over the whole validation set, which is not a mean over batches."""

    def eval_batch_size(self, config: Any) -> int:
        return 4

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return {"out": model(batch[0]), "target": batch[1]}

    def evaluate(self, outputs: list[Any], config: Any) -> Mapping[str, float]:
        assert [len(each["out"]) for each in outputs] == [4, 2]
        worst = torch.cat([(each["out"] - each["target"]).abs().flatten() for each in outputs]).max()
        return {"worst": float(worst), "number": config["number"]}


@pytest.mark.parametrize("members", [1, 3])
def test_evaluate_sees_the_whole_validation_set(members: int, tmp_path: Path) -> None:
    reports = work(Scores(), tmp_path, [Member(trial(b), 0, 1) for b in range(members)])
    for report in reports:
        model = Scores().model({})
        found = load_newest(tmp_path, report.trial)
        assert found is not None
        model.load_state_dict(found.model)
        expected = float((model(X[:6]) - Y[:6]).abs().max().detach())
        assert report.metrics["worst"] == pytest.approx(expected, rel=1e-9)
        assert report.metrics["number"] == report.trial
    assert len(reports) == members


@pytest.mark.parametrize("members", [1, 3])
def test_means_over_samples_do_not_depend_on_the_validation_batch(members: int, tmp_path: Path) -> None:
    class Sized(Small):
        size = 0

        def eval_batch_size(self, config: Any) -> int:
            return self.size

        def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
            return {"error": (model(batch[0]) - batch[1]).abs().mean()}

    found = []
    for size in (1, 4, 1000):
        task = Sized()
        task.size = size
        (tmp_path / str(size)).mkdir()
        reports = work(task, tmp_path / str(size), [Member(trial(b), 0, 1) for b in range(members)])
        found.append([{name: report.metrics[name] for name in ("valid_loss", "error")} for report in reports])
    for metrics in found:
        for mine, own in zip(metrics, found[0], strict=True):
            assert mine == pytest.approx(own, rel=1e-9)


def test_the_best_model_has_the_averages(tmp_path: Path) -> None:
    study = search(Averages(), {"lr": 0.01, "number": 0}, tmp_path / "study", algorithm=shoal.Random(1, epochs=2))
    found = load_weights(tmp_path / "study", 0)
    model = study.best_model(which="last")
    assert found.average.keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(model.state_dict(), dict(found.average))


class Tied(nn.Module):
    """Has two layers with one weight, which a state dict contains under both names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(torch.tanh(self.first(x))))
        return out


class AveragesTied(Averages):
    def model(self, config: Any) -> nn.Module:
        return Tied()


def test_the_best_model_has_the_averages_of_tied_parameters(tmp_path: Path) -> None:
    study = search(AveragesTied(), {"lr": 0.1, "number": 0}, tmp_path / "study", algorithm=shoal.Random(1, epochs=2))
    found = load_weights(tmp_path / "study", 0)
    assert not found.average["first.weight"].equal(found.model["first.weight"])
    model = study.best_model(which="last")
    assert model.get_parameter("second.weight") is model.get_parameter("first.weight")
    torch.testing.assert_close(dict(model.named_parameters()), dict(found.average))


def test_a_trial_without_averages_takes_none_from_the_checkpoint_that_it_copies(tmp_path: Path) -> None:
    work(Averages(), tmp_path, [Member(trial(0), 0, 2)])
    copier = replace(trial(1), origin=Origin(0, 2))
    copy_checkpoint(tmp_path, copier)
    (report,) = work(Averages(), tmp_path, [Member(copier, 2, 3)])
    found = load_newest(tmp_path, 1)
    assert found is not None
    assert not found.average
    model = Averages().model({})
    model.load_state_dict(found.model)
    assert report.metrics["valid_loss"] == pytest.approx(
        float((model(X[:6]) - Y[:6]).square().mean().detach()), rel=1e-9
    )


def test_a_parameter_that_is_unfrozen_later_is_averaged_from_then_on() -> None:
    (one,) = runtimes(Averages(), [trial(0)])
    weight = one.model.get_parameter("0.weight").requires_grad_(False)
    update_averages([one])
    assert "0.weight" not in one.average
    weight.requires_grad_()
    first = weight.detach().clone()
    update_averages([one])
    with torch.no_grad():
        weight.add_(1)
    update_averages([one])
    torch.testing.assert_close(one.average["0.weight"], 0.5 * first + 0.5 * (first + 1))


def test_averages_count_as_memory_of_a_trial_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = runtimes(Averages(), [trial(0)])
    monkeypatch.setattr(worker_state, "CPU_CACHE_BYTES", sum(each.nbytes for each in one.model.parameters()))
    cache, one.step = TrialCache(), 1
    save(one, tmp_path)
    cache.put(one)
    assert cache.take(one.member, tmp_path) is not None
    update_averages([one])
    cache.put(one)
    assert cache.take(one.member, tmp_path) is None


@pytest.mark.parametrize(
    ("accumulate", "drop_last", "samples"), [(3, True, [20]), (2, False, [20, 5]), (1, True, [10, 10])]
)
def test_the_samples_of_a_step_are_those_of_its_batches(accumulate: int, drop_last: bool, samples: list[int]) -> None:
    train = Batches(TensorDataset(torch.zeros(25, 1)), CPU, "training", settings=LoaderSettings(drop_last=drop_last))
    plan = StepPlan(StepSettings(10, 10, accumulate), train, Small()._weigh)
    assert [plan.samples(0, step) for step in range(plan.epoch_steps)] == samples


class DrawsScores(Scores):
    """Draws a random score, as a clustering or a bootstrap does."""

    def evaluate(self, outputs: list[Any], config: Any) -> Mapping[str, float]:
        return {"score": float(torch.rand(()))}


def test_evaluate_draws_alike_alone_and_with_others(tmp_path: Path) -> None:
    together = work(DrawsScores(), tmp_path / "together", [Member(trial(b), 0, 1) for b in range(3)])
    scores = {report.trial: report.metrics["score"] for report in together}
    assert len(set(scores.values())) == 3
    for b in range(3):
        (alone,) = work(DrawsScores(), tmp_path / str(b), [Member(trial(b), 0, 1)])
        assert alone.metrics["score"] == scores[b]


class RefusesNaN(Scores):
    def evaluate(self, outputs: list[Any], config: Any) -> Mapping[str, float]:
        if any(each["out"].isnan().any() for each in outputs):
            raise ValueError("Input contains NaN.")
        return super().evaluate(outputs, config)


def test_a_diverged_trial_fails_by_its_loss_and_not_in_evaluate(tmp_path: Path) -> None:
    trials = [trial(0), trial(1, lr=1e200), trial(2)]
    reports = {each.trial: each for each in work(RefusesNaN(), tmp_path, [Member(one, 0, 1) for one in trials])}
    assert {number for number, report in reports.items() if "worst" in report.metrics} == {0, 2}
    assert reports[1].state is TrialState.FAILED
    assert reports[1].reason.startswith("loss is not finite at step ")


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("accumulate", 0, "`accumulate` must return a positive integer, got 0"),
        ("steps_per_epoch", 0, "`steps_per_epoch` must return a positive integer, got 0"),
        ("steps_per_epoch", 2.5, "must return a positive integer, or a share of a pass below 1, got 2.5"),
        ("steps_per_epoch", 1.0, "must return a positive integer, or a share of a pass below 1, got 1.0"),
        ("steps_per_epoch", float("nan"), "must return a positive integer, or a share of a pass below 1, got nan"),
        ("clip_norm", -1.0, "`clip_norm` must return a number of at least 0, or None, got -1.0"),
        ("ema", 1, "`ema` must return a decay of at least 0 and below 1, or None, got 1"),
        ("precision", "16", "must return one of '32', 'bf16-mixed', '16-mixed', 'auto', got '16'"),
        ("precision", ["32"], r"must return one of '32', 'bf16-mixed', '16-mixed', 'auto', got \['32'\]"),
        ("eval_batch_size", "8", "`eval_batch_size` must return a positive integer, got '8'"),
    ],
)
def test_a_wrong_value_is_refused(method: str, value: Any, message: str) -> None:
    task = type("Odd", (Small,), {method: lambda self, config: value})()
    with pytest.raises(TaskError, match=message):
        StepSettings.of(task, {"number": 0})


def test_a_value_in_the_place_of_a_method_is_refused() -> None:
    task = type("Odd", (Small,), {"accumulate": 2})()
    with pytest.raises(TaskError, match="attribute `accumulate` is 2, and must be a method"):
        StepSettings.of(task, {"number": 0})


def test_a_step_of_the_users_clips_by_itself() -> None:
    class Own(Clips):
        def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
            raise AssertionError

    with pytest.raises(TaskError, match="overrides `step`, which then does the work of `clip_norm` itself"):
        StepSettings.of(Own(), {"number": 0})
