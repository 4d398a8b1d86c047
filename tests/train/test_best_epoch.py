"""The best epoch of a trial: its weights are kept beside the newest, and a crash does not change them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, search
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.array import Array, FusionKey, Member
from shoal.core.epoch_order import EpochOrder
from shoal.core.errors import AlgorithmError, ShoalError, TaskError
from shoal.core.job import Job, WorkerContext
from shoal.core.objective import Objective
from shoal.core.trial import Trial
from shoal.task import Task
from shoal.train import array_trainer
from shoal.train.checkpoint import load_newest, load_weights
from shoal.train.checkpoint_paths import checkpoint_files, state_files
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

SCORE = EpochOrder((Objective("score", "max"),))
EPOCHS, STEPS = 8, 2
BEST = {0.1: 5, 0.25: 2, 0.5: 1, 0.05: 8}
"""Learning rate -> the epoch at which the weight is nearest to 1."""


class Rising(Task):
    """A weight that rises by the learning rate in each of two steps of an epoch, and is best at 1."""

    def data(self, config: Mapping[str, Any]) -> Any:
        samples = TensorDataset(torch.ones(4, 1, dtype=torch.float64))
        return samples, samples

    def model(self, config: Mapping[str, Any]) -> nn.Module:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        return model

    def optimizer(self, model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def batch_size(self, config: Mapping[str, Any]) -> int:
        return 2

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return -model(batch[0]).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"score": -(model(batch[0]).mean() - 1).square()}

    def ema(self, config: Mapping[str, Any]) -> float | None:
        return config.get("ema")


class Killed(BaseException):
    """Ends a job as a kill does: nothing is saved."""


def members(ema: float | None = None) -> list[Member]:
    return [Member(Trial(n, {"lr": lr, "ema": ema}, n, 7), 0, EPOCHS) for n, lr in enumerate(BEST)]


def train(directory: Path, seconds: float = 0.0, ema: float | None = None) -> None:
    """Train all members as one array, which is saved each so many seconds."""
    directory.mkdir(exist_ok=True)
    task = Rising()
    sets = DataSets(task, CPU)
    state = WorkerState(task, sets, TrialCache(), CPU, directory, SCORE)
    job = Job("job", (Array(FusionKey("net", "data", 2), tuple(members(ema))),))
    context = WorkerContext(directory, b"", checkpoint_seconds=seconds, of_best=SCORE)
    for _ in Trainer(job, state, SignatureBuilder(task, sets), JobControl(prompt=True), context).run():
        pass


def best_files(directory: Path) -> list[list[str]]:
    """The names, which have the checksums, of the files with the weights of the best and of the last epoch."""
    return [[path.name for path in checkpoint_files(directory, number)] for number in range(len(BEST))]


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_each_member_of_an_array_keeps_the_weights_of_its_own_best_epoch(seconds: float, tmp_path: Path) -> None:
    train(tmp_path, seconds)
    for number, (lr, best) in enumerate(BEST.items()):
        assert load_weights(tmp_path, number, best).model["weight"].item() == pytest.approx(STEPS * lr * best, 1e-12)
        newest = load_newest(tmp_path, number)
        assert newest is not None
        assert (newest.epoch, newest.best_epoch) == (EPOCHS, best)
        assert load_weights(tmp_path, number).model["weight"].item() == pytest.approx(STEPS * lr * EPOCHS, 1e-12)
        kept = {int(path.name[:6]) for path in checkpoint_files(tmp_path, number)}
        assert {best, EPOCHS} <= kept <= {best, EPOCHS, EPOCHS - 1}
        assert best == EPOCHS or all(int(path.name[:6]) > best for path in state_files(tmp_path, number))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("steps", [1, 3, 4, 7, 10, 11, 15])
def test_a_kill_at_any_step_leaves_the_same_weights(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole")
    left = iter(range(steps))
    take = array_trainer.ArrayTrainer._take_step

    def killed(*arguments: Any) -> Tensor:
        if next(left, None) is None:
            raise Killed
        return take(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(array_trainer.ArrayTrainer, "_take_step", killed)
        with pytest.raises(Killed):
            train(tmp_path / "killed", seconds=0.0 if steps % 2 else 30.0)
    train(tmp_path / "killed")
    assert [
        set(names) - set(wanted)
        for names, wanted in zip(best_files(tmp_path / "killed"), best_files(tmp_path / "whole"), strict=True)
    ] == [set()] * len(BEST)
    for number, best in enumerate(BEST.values()):
        assert any(
            path.name.startswith(f"{best:06d}-000000-") for path in checkpoint_files(tmp_path / "killed", number)
        )


def test_the_average_is_what_was_measured_and_is_kept(tmp_path: Path) -> None:
    train(tmp_path, ema=0.5)
    newest = load_newest(tmp_path, 1)
    assert newest is not None
    weight, average = 0.25, 0.25
    for _ in range(STEPS * newest.best_epoch - 1):
        weight += 0.25
        average += (weight - average) / 2
    scores = [report.metrics["score"] for report in newest.reports]
    assert max(scores) == scores[newest.best_epoch - 1] == pytest.approx(-((average - 1) ** 2))
    found = load_weights(tmp_path, 1, newest.best_epoch)
    assert found.average["weight"].item() == pytest.approx(average, 1e-12)
    assert found.model["weight"].item() == pytest.approx(weight, 1e-12)


def test_best_weights_that_are_gone_are_replaced_by_earlier_ones_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    (path,) = (path for path in checkpoint_files(tmp_path, 0) if path.name.startswith("000005"))
    path.write_bytes(b"damaged")
    assert load_weights(tmp_path, 0, 5).epoch == EPOCHS
    assert "is damaged" in caplog.text
    assert "trial 0 has the weights after epoch 8, as those of its best epoch, 5, are not on the disk" in caplog.text


def test_a_study_ranks_by_the_best_epochs_and_returns_their_models(tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.05, 0.1, 0.3])}
    goal: dict[str, Any] = {"metric": "score", "mode": "max", "algorithm": shoal.Grid(epochs=6)}
    study = search(Rising(), space, tmp_path / "best", **goal)
    assert [(row.best_epoch, row.epoch) for row in study.trials] == [(6, 6), (5, 6), (2, 6)]
    assert (study.best_trial.number, study.best_trial.objective) == (1, pytest.approx(0))
    assert study.best_model().weight.item() == pytest.approx(1)
    assert study.best_model(which="last").weight.item() == pytest.approx(1.2)
    assert study.to_optuna().best_value == pytest.approx(0)
    with pytest.raises(ShoalError, match='`which` must be "best" or "last", got \'first\''):
        study.model(1, which="first")  # type: ignore[arg-type]

    last = search(Rising(), space, tmp_path / "last", rank_by="last", **goal)
    assert [row.best_epoch for row in last.trials] == [None] * 3
    assert (last.best_trial.number, last.best_trial.objective) == (1, pytest.approx(-0.04))
    assert last.best_model().weight.item() == pytest.approx(1.2)
    assert all(len(checkpoint_files(tmp_path / "last", number)) == 1 for number in range(3))


@pytest.mark.parametrize(("mode", "best"), [("max", 1), ("min", 4)])
def test_another_metric_decides_the_best_epoch(mode: str, best: int, tmp_path: Path) -> None:
    goal: dict[str, Any] = {"metric": "score", "mode": "max", "algorithm": shoal.Grid(epochs=4)}
    study = search(Rising(), {"lr": 0.2}, tmp_path / "study", best_by={"valid_loss": mode}, **goal)
    (row,) = study.trials
    weight = 2 * 0.2 * best
    assert (row.best_epoch, row.objective) == (best, pytest.approx(-((weight - 1) ** 2)))
    assert row.ranked["valid_loss"] == pytest.approx(-weight)
    assert row.best["valid_loss"] == pytest.approx(-0.4 if mode == "max" else -1.6)
    assert study.best_model().weight.item() == pytest.approx(weight)


def test_a_metric_that_is_to_decide_and_is_not_reported_is_named(tmp_path: Path) -> None:
    goal: dict[str, Any] = {"metric": "score", "mode": "max", "algorithm": shoal.Grid(epochs=1)}
    said = (
        "best_by 'los' is not reported by the task; it reports 'score', 'valid_loss'. It decides which epoch of a "
        "trial is the best. Name one of these with its mode where it was given, best_by= of shoal.tune, monitor= of "
        "ModelCheckpoint or metric_for_best_model of TrainingArguments; or report it from the first epoch on"
    )
    with pytest.raises(TaskError, match=re.escape(said)):
        search(Rising(), {"lr": 0.2}, tmp_path / "study", best_by={"los": "min"}, **goal)


def test_copies_of_a_population_begin_anew_with_their_best_epochs(tmp_path: Path) -> None:
    study = search(
        Rising(),
        {"lr": shoal.uniform(0.05, 0.3)},
        tmp_path / "study",
        metric="score",
        mode="max",
        algorithm=shoal.PBT(4, epochs=6, interval=2, truncation=0.25),
    )
    copies = [row for row in study.trials if row.trial.origin is not None]
    assert copies
    for row in copies:
        assert row.best_epoch is not None
        assert row.trial.start < row.best_epoch <= row.epoch
        assert -((study.model(row.number).weight.item() - 1) ** 2) == pytest.approx(row.objective)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank_by": "first"}, '`rank_by` must be "best" or "last", got \'first\''),
        (
            {"best_by": "loss"},
            "`best_by` must be one of the metrics 'score', got 'loss'; another metric needs",
        ),
        ({"best_by": {"loss": "low"}}, "`best_by` must be one metric with its mode, such as .*, got {'loss': 'low'}"),
        ({"best_by": {"a": "min", "b": "max"}}, "`best_by` must be one metric with its mode"),
        ({"best_by": {"score": "min"}}, "`best_by` must have the mode of the metric, 'max', got {'score': 'min'}"),
        ({"rank_by": "last", "best_by": "score"}, '`best_by` chooses the best epoch, and rank_by="last" has none'),
    ],
)
def test_unknown_ways_to_rank_are_refused_before_there_is_a_study(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(AlgorithmError, match=message):
        search(
            Rising(), {"lr": 0.1}, tmp_path / "study", metric="score", mode="max", algorithm=shoal.Grid(1), **arguments
        )
    assert not (tmp_path / "study").exists()
