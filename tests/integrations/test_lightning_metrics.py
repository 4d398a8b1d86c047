"""LightningTask with metrics of torchmetrics that a module holds, against `Trainer.fit`."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_lightning_task import CPU, EPOCHS, SIZE, Classifier, Data, fit, float64, tune
from torch import Tensor, nn

import shoal
from shoal.core.array import Member
from shoal.core.errors import ShoalError, TaskError
from shoal.core.trial import Trial
from shoal.integrations.lightning import LightningTask
from shoal.train.data.datasets import DataSets
from shoal.train.fused_stepper import FusedStepper
from shoal.train.trial_runtime import build

torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and short epochs
__all__ = ["float64"]


def accuracy() -> Any:
    return torchmetrics.Accuracy("multiclass", num_classes=3)


class Measured(Classifier):
    """Metrics that are called, updated, logged as objects, by batch, as a collection, and at the end of validation."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.train_accuracy, self.accuracy, self.by_batch, self.at_end, self.changed = (accuracy() for _ in range(5))
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)
        self.error = torchmetrics.MeanMetric()
        scores = {
            "f1": torchmetrics.F1Score("multiclass", num_classes=3, average="macro"),
            "precision": torchmetrics.Precision("multiclass", num_classes=3, average="macro"),
        }
        self.scores = torchmetrics.MetricCollection(scores, prefix="val_")
        self.batch_scores, self.end_scores = self.scores.clone(prefix="batch/"), self.scores.clone(prefix="end_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.train_accuracy(logits, batch[1])
        self.log("train_accuracy", self.train_accuracy, on_step=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, y = self(batch[0]), batch[1]
        loss = F.cross_entropy(logits, y)
        self.log("val_loss", loss)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        self.log("by_batch", self.by_batch(logits, y))
        self.auroc.update(logits.softmax(1), y)
        self.log("auroc", self.auroc, on_epoch=True, prog_bar=True)
        self.error(loss, weight=2.0)
        self.log("error", self.error)
        self.scores.update(logits, y)
        self.log_dict(self.scores)
        self.log_dict(self.batch_scores(logits, y))
        self.log("by_key", self.scores["val_f1"])
        self.at_end.update(logits, y)
        self.end_scores.update(logits, y)
        changed = logits.detach().clone()
        self.changed.update(changed, y)
        changed.zero_()

    def on_validation_epoch_end(self) -> None:
        self.log("mistakes", 1 - self.at_end.compute())
        self.at_end.reset()
        self.log_dict(self.end_scores)
        self.log("changed", self.changed)


NAMES = {
    *("accuracy", "by_batch", "auroc", "error", "mistakes", "val_f1", "val_precision", "batch/f1", "batch/precision"),
    *("by_key", "end_f1", "end_precision", "changed"),
}


MEMBERS = [Member(Trial(b, {"lr": lr}, seed=b, data_seed=0), 0, 1) for b, lr in enumerate((0.01, 0.1, 0.3))]


def validated(module: Any, *some: Member) -> list[dict[str, float]]:
    """Metrics of members of one array after a step."""
    task = LightningTask(module, Data())
    train, valid = DataSets(task, CPU).of({"lr": 0.1})
    stepper = FusedStepper(task, [build(task, each, CPU) for each in some])
    stepper.train_step([next(train.iterate(SIZE))] * len(some), [0] * len(some))
    assert not stepper.refusal
    return stepper.validate(list(valid.iterate(SIZE)))


def test_an_array_is_validated_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        found = validated(Measured, *MEMBERS)
    assert not [each.getMessage() for each in caplog.records], "nothing runs member by member"
    assert found == [pytest.approx(*validated(Measured, each), rel=1e-9) for each in MEMBERS]


@pytest.mark.usefixtures("fusing_pays")
def test_metrics_are_those_of_trainer_fit(tmp_path: Path) -> None:
    study = tune(LightningTask(Measured, Data()), {"lr": shoal.choice([0.01, 0.3])}, tmp_path)
    for row in study.trials:
        model, losses = fit(row.trial, Measured, Data())
        assert set(row.metrics) == {"valid_loss", "val_loss", *NAMES}
        for name in NAMES:
            assert row.metrics[name] == pytest.approx(losses.metrics[name], rel=1e-9), name
        torch.testing.assert_close(
            study.model(row.number, "last").state_dict(), model.state_dict(), rtol=1e-9, atol=1e-9
        )
        assert study.rerun(row.number).largest < 1e-9
        assert {check.reason for check in study.proof(row.number)} == {""}, "it was an array to the end"
    assert isinstance(study.best_model().accuracy, torchmetrics.Metric)


def test_metrics_start_anew_after_a_promotion(tmp_path: Path) -> None:
    study = shoal.tune(
        LightningTask(Measured, Data), {"lr": shoal.choice([0.01, 0.1, 0.3])}, metric="auroc", mode="max",
        algorithm=shoal.SuccessiveHalving(3, min_epochs=1, max_epochs=EPOCHS, eta=3), devices="cpu:1",
        backend="inline", directory=tmp_path / "study", show_progress=False,
    )  # fmt: skip
    (row,) = [study.trials[each] for each in study.dataframe().query(f"epochs == {EPOCHS}").trial]
    _, losses = fit(row.trial, Measured, Data())
    assert {name: row.metrics[name] for name in NAMES} == pytest.approx(
        {name: losses.metrics[name] for name in NAMES}, rel=1e-9
    )


class Shared(Measured):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.train_accuracy(self(batch[0]), batch[1])


class Computes(Measured):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.accuracy.compute())


class Scales(Measured):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("percent", 100 * self.accuracy(self(batch[0]), batch[1]))


class Forgets(Measured):
    def on_validation_epoch_end(self) -> None:
        self.log("mistakes", 1 - self.at_end.compute())


class Compares(Measured):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("perfect", float(self.accuracy(self(batch[0]), batch[1]) == 1))


class UpdatesOneOfACollection(Measured):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name, each in self.scores.items():
            each.update(self(batch[0]), batch[1])
            self.log(name, each)


class UnknownKey(Measured):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("recall", self.scores["recall"])


class LogsNoNumber(Measured):
    def on_validation_epoch_end(self) -> None:
        self.log("mistakes", None)


class PerClass(Measured):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        each = torchmetrics.Accuracy("multiclass", num_classes=3, average=None)
        self.per_class = torchmetrics.MetricCollection({"class": torchmetrics.ClasswiseWrapper(each)})

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_dict(self.per_class(self(batch[0]), batch[1]))
        return F.cross_entropy(self(batch[0]), batch[1])


class Collects(Measured):
    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.found).mean())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Shared, "training_step and validation_step update the same metric self.train_accuracy"),
        (Computes, r"self.accuracy.compute; .* can only update a metric, and log it"),
        (Scales, r"computes with the value of the metric self.accuracy, .*torchmetrics.functional"),
        (Compares, r"computes with the value of the metric self.accuracy, .*torchmetrics.functional"),
        (UpdatesOneOfACollection, "updates self.scores.val_f1 of a collection by itself; update the collection"),
        (UnknownKey, r"a step uses self.scores.\['recall'\]"),
        (LogsNoNumber, r"self.log\('mistakes', ...\) is given NoneType; log a tensor or a number"),
        (PerClass, "self.per_class.class has several values; .* log each value by a name of its own"),
        (Forgets, r"uses the metric self.at_end and does not reset it, .*call self.at_end.reset\(\)"),
        (Collects, "on_validation_epoch_end uses self.found; .*ReportCheckpointCallback"),
    ],
)
def test_uses_without_an_equal_are_refused_by_name(module: Any, said: str) -> None:
    with pytest.raises(ShoalError, match=said):
        validated(module, MEMBERS[0])


def test_a_study_ends_with_the_refusal(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="training_step and validation_step update the same metric"):
        tune(LightningTask(Shared, Data()), {"lr": 0.1}, tmp_path, trials=1)


class Nested(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.of_stage = nn.ModuleDict({"val": accuracy()})


class InAList(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.all = [accuracy()]


class TwoNames(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.in_training = self.in_validation = accuracy()


class CallsSuper(Measured):
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()


class WithoutMetrics(Classifier):
    def on_validation_epoch_end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Nested, "the metric of_stage.val of torchmetrics in another module; make it an attribute"),
        (InAList, "holds metrics of torchmetrics in self.all, a list; make it an attribute"),
        (TwoNames, "holds one metric as self.in_training and as self.in_validation, .*make one metric for each"),
        (CallsSuper, r"CallsSuper.on_validation_epoch_end calls super\(\), .*leave the call out"),
        (WithoutMetrics, "WithoutMetrics defines on_validation_epoch_end and holds no metrics of torchmetrics"),
    ],
)
def test_modules_without_an_equal_are_refused_by_name(module: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        LightningTask(module, Data()).model({})
