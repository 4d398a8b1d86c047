"""`ModelCheckpoint(monitor=)` and `load_best_model_at_end`: a study keeps the weights that they keep."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from test_lightning_task import EPOCHS, Classifier, Data, fit
from test_trainer_task import CLASSIFIED, DATA_SEED, FEW, arguments, bert, by_trainer, score, sentences

import shoal
from shoal.arguments import with_best_epoch
from shoal.core.errors import TaskError
from shoal.core.objective import Objective
from shoal.integrations.lightning import LightningTask
from shoal.integrations.transformers import TrainerTask
from shoal.spec import StudySpec

LOSS, F1 = Objective("val_loss", "min"), Objective("f1", "max")


def lightning_task(*callbacks: Any) -> Any:
    return LightningTask(Classifier, Data(), callbacks=list(callbacks))


READ: dict[str, tuple[list[dict[str, Any]], Objective | None]] = {
    "the best by a loss": ([{"monitor": "val_loss"}], LOSS),
    "the best by a score": ([{"monitor": "f1", "mode": "max"}], F1),
    "and the last": ([{"monitor": "val_loss", "save_last": True, "save_weights_only": True}], LOSS),
    "each epoch": ([{"monitor": "val_loss", "every_n_epochs": 1, "save_on_train_epoch_end": True}], LOSS),
    "twice the same": ([{"monitor": "val_loss"}, {"monitor": "val_loss", "save_last": "link"}], LOSS),
    "only the last": ([{}, {"save_top_k": 0, "save_last": True}], None),
    "the last beside the best": ([{"save_last": True}, {"monitor": "f1", "mode": "max"}], F1),
    "no best one": ([{"monitor": "val_loss", "save_top_k": 0}], None),
    "at no epoch": ([{"monitor": "val_loss", "every_n_epochs": 0}], None),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_checkpoint_keeps_is_read(name: str) -> None:
    settings, expected = READ[name]
    asked = lightning_task(*(ModelCheckpoint(**each) for each in settings))._best_epoch()
    assert (asked and asked[1]) == expected


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "several best ones": ([{"save_top_k": 3}], r"save_top_k=3 of .*: a trial keeps the weights of its best epoch and"),
    "all": ([{"save_top_k": -1}], r"save_top_k=-1 of ModelCheckpoint\(monitor='val_loss', mode='min'\): .*keep= of"),
    "by steps": ([{"every_n_train_steps": 7}], "every_n_train_steps=7 of .* checkpoint_seconds of `shoal.tune`; leave"),
    "by time": ([{"train_time_interval": timedelta(minutes=5)}], "train_time_interval=.* compares all epochs"),
    "some epochs": ([{"every_n_epochs": 2}], "every_n_epochs=2 of .*: a study compares all epochs of a trial"),
    "a directory": ([{"dirpath": "checkpoints"}], r"dirpath='.*checkpoints' of .*study.best_model\(\).*leave it out"),
    "a name": ([{"filename": "{epoch}"}], r"filename='\{epoch\}' of .*study.model\(number\) have the weights"),
    "two metrics": (
        [{}, {"monitor": "f1", "mode": "max"}],
        r"one ModelCheckpoint with a monitor, got .*'val_loss', mode='min'\) and ModelCheckpoint\(monitor='f1'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_study_does_not_keep_is_refused(name: str) -> None:
    settings, said = REFUSED[name]
    with pytest.raises(TaskError, match=said):
        lightning_task(*(ModelCheckpoint(**({"monitor": "val_loss"} | each)) for each in settings))


def test_early_stopping_and_a_checkpoint_go_together() -> None:
    task = lightning_task(ModelCheckpoint(monitor="f1", mode="max"), EarlyStopping("val_loss", patience=4))
    assert task._best_epoch() == ("ModelCheckpoint(monitor='f1', mode='max')", F1)
    assert task._stop_rules([LOSS]) == [shoal.Patience(4)]


def trainer_task(directory: Path, **settings: Any) -> Any:
    args = arguments(directory, eval_strategy="epoch", save_strategy="epoch", **settings)
    return TrainerTask(bert, args, CLASSIFIED[:FEW], CLASSIFIED[:7], sentences, score)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"metric_for_best_model": "eval_f1"}, None),
        ({"load_best_model_at_end": True}, Objective("valid_loss", "min")),
        ({"load_best_model_at_end": True, "metric_for_best_model": "loss"}, Objective("valid_loss", "min")),
        ({"load_best_model_at_end": True, "metric_for_best_model": "eval_f1"}, F1),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "error", "greater_is_better": False},
            Objective("error", "min"),
        ),
    ],
)
def test_what_trainer_loads_at_the_end_is_read(settings: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    asked = trainer_task(tmp_path, **settings)._best_epoch()
    assert (asked and asked[1]) == expected


class Keeping:
    """Stands for a task whose trainer keeps the best epoch by an objective."""

    def __init__(self, goal: Objective | None) -> None:
        self.goal = goal

    def _best_epoch(self) -> tuple[str, Objective] | None:
        return self.goal and ("what is asked", self.goal)


ONE = {"metric": "val_loss", "mode": "min"}
TWO = {"metric": ["val_loss", "f1"], "mode": ["min", "max"]}

TAKEN: dict[str, tuple[dict[str, Any], Objective | None, Any]] = {
    "nothing is asked": ({**ONE, "rank_by": "last"}, None, None),
    "the metric": (ONE, LOSS, None),
    "the first metric": (TWO, LOSS, None),
    "the second metric": (TWO, F1, {"f1": "max"}),
    "no metric of the study": (ONE, F1, {"f1": "max"}),
    "as tune says": ({**TWO, "best_by": "f1"}, F1, "f1"),
    "as tune says with the mode": ({**ONE, "best_by": {"f1": "max"}}, F1, {"f1": "max"}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_it_decides_the_best_epoch(name: str) -> None:
    fields, goal, best_by = TAKEN[name]
    spec = with_best_epoch(StudySpec(**fields), Keeping(goal))
    assert spec.best_by == best_by
    assert goal is None or spec.of_best.objectives[0] == goal
    assert StudySpec.from_json(spec.to_json()).of_best == spec.of_best


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param({**ONE, "rank_by": "last"}, 'given rank_by="last", .*; leave one of the two out', id="last"),
        pytest.param(
            {**TWO, "best_by": "val_loss"}, "best f1, mode='max', and .* best_by='val_loss'; make them", id="another"
        ),
        pytest.param(
            {**ONE, "best_by": {"f": "min"}}, r"what is asked keeps .* given best_by=\{'f': 'min'\}", id="no metric"
        ),
        pytest.param({"metric": "f1", "mode": "min"}, "metric='f1' with mode='min'; make them agree", id="other mode"),
    ],
)
def test_what_differs_from_tune_is_refused_with_both_names(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        with_best_epoch(StudySpec(**fields), Keeping(F1))


def tune(task: Any, space: dict[str, Any], metric: str, directory: Path, epochs: int = EPOCHS, **more: Any) -> Any:
    return shoal.tune(
        task, space, metric=metric, mode="max", algorithm=shoal.Grid(epochs=epochs), devices="cpu:1", backend="inline",
        directory=directory / "study", show_progress=False, **more,
    )  # fmt: skip


@pytest.fixture
def float64() -> Iterator[None]:
    """Modules are of the type of the data."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and short epochs
@pytest.mark.parametrize(
    ("monitor", "mode"), [pytest.param("accuracy", "max", id="the metric"), pytest.param("val_loss", "min", id="other")]
)
@pytest.mark.usefixtures("float64")
def test_models_are_those_that_lightning_keeps(monitor: str, mode: str, tmp_path: Path) -> None:
    study = tune(
        lightning_task(ModelCheckpoint(monitor=monitor, mode=mode, save_last=True)), {"lr": shoal.grid([0.02, 0.3])},
        "accuracy", tmp_path,
    )  # fmt: skip
    for row in study.trials:
        saver = ModelCheckpoint(tmp_path / str(row.number), monitor=monitor, mode=mode)
        fit(row.trial, Classifier, Data(), saver)
        kept = torch.load(saver.best_model_path, weights_only=False)
        assert row.best_epoch == kept["epoch"] + 1
        torch.testing.assert_close(study.model(row.number).state_dict(), kept["state_dict"], rtol=1e-9, atol=1e-9)
        assert row.ranked[monitor] == pytest.approx(float(saver.best_model_score), rel=1e-9)
        assert row.objective == row.ranked["accuracy"]


@pytest.mark.parametrize(("best", "epoch"), [("eval_loss", 2), ("eval_score", 1)])
def test_models_are_those_that_trainer_loads_at_the_end(best: str, epoch: int, tmp_path: Path) -> None:
    settings = {"num_train_epochs": 3, "load_best_model_at_end": True, "metric_for_best_model": best}
    settings |= {"learning_rate": 5e-2, "lr_scheduler_type": "constant"}
    study = tune(trainer_task(tmp_path, **settings), {}, "score", tmp_path, 3, data_seed=DATA_SEED)
    args = arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch", **settings)
    evaluations, weights = by_trainer(bert, args, CLASSIFIED, sentences)
    (row,) = study.trials
    assert row.best_epoch == epoch
    torch.testing.assert_close(dict(study.model(row.number).state_dict()), dict(weights), rtol=1e-9, atol=1e-9)
    assert row.objective == pytest.approx(evaluations[epoch - 1]["eval_score"], rel=1e-9)
