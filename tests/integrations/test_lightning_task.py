"""LightningTask against `Trainer.fit` on the same order of samples, and what it refuses."""

import math
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import shoal
from shoal.arguments import study_warnings
from shoal.core.array import Member
from shoal.core.errors import ShoalError, TaskError
from shoal.core.space import Space
from shoal.core.trial import Trial, TrialState
from shoal.fuse.generators import seed_all
from shoal.integrations.lightning import LightningTask
from shoal.train.array_members import LossTracker
from shoal.train.data.datasets import DataSets
from shoal.train.fused_stepper import FusedStepper
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.trial_runtime import build

lightning = pytest.importorskip("lightning.pytorch")

CPU = torch.device("cpu")

EPOCHS, SAMPLES, SIZE = 3, 22, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and short epochs


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Arithmetic of numbers with `global_step` is that of torch's default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = numbers(SAMPLES + 6, 5)
Y = X.abs().sum(1).long() % 3
PAIRS = X + 0.1 * numbers(SAMPLES + 6, 5, seed=1)


class Data(lightning.LightningDataModule):
    """Features with labels, or with a second view of each sample."""

    def __init__(self, batch_size: int = SIZE, second: Any = Y) -> None:
        super().__init__()
        self.batch_size, self.second = batch_size, second

    def setup(self, stage: str) -> None:
        whole = TensorDataset(X, self.second)
        self.train = torch.utils.data.Subset(whole, range(SAMPLES))
        self.valid = torch.utils.data.Subset(whole, range(SAMPLES, SAMPLES + 6))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.valid, self.batch_size)


class Pairs(Data):
    def __init__(self) -> None:
        super().__init__(second=PAIRS)


class Classifier(lightning.LightningModule):
    """Batch statistics, hyper-parameters read from `self.hparams`, a schedule per epoch every second epoch."""

    def __init__(self, lr: float = 0.1, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log_dict({"accuracy": (logits.argmax(1) == y).double().mean()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "epoch", "frequency": 2}]


class Distilled(Classifier):
    """Learns from a teacher with dropout that stays in evaluation mode; the optimizer has the last layer only."""

    def __init__(self, lr: float = 0.1, width: int = 8) -> None:
        super().__init__(lr, width)
        self.teacher = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).requires_grad_(False).eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), self.teacher(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[3].parameters(), lr=self.hparams.lr)


class Autoencoder(lightning.LightningModule):
    """A weight that rises with `global_step`, `current_epoch` and `batch_idx`; a dict as result of the step."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.encoder, self.decoder = nn.Linear(5, 2), nn.Linear(2, 5)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        code = self.encoder(batch[0])
        weight = 0.01 * self.global_step + 0.1 * self.current_epoch + 0.03 * batch_idx
        return {"loss": F.mse_loss(self.decoder(code), batch[0]) + weight * code.square().mean(), "code": code}

    def validation_step(self, batch: Any) -> Tensor:
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("val_error", loss + 0.01 * self.current_epoch + 0.001 * self.global_step, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Transformer(lightning.LightningModule):
    """One cycle over `estimated_stepping_batches`, or a warm-up, per step."""

    def __init__(self, lr: float = 0.05, cycle: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.embed(batch[0][..., None])).mean(1)), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        if self.hparams.cycle:
            schedule: Any = OneCycleLR(optimizer, self.hparams.lr, self.trainer.estimated_stepping_batches)
        else:
            schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1}}


class PairLoss(lightning.LightningModule):
    """Self-supervised: each sample against its second view; the learning rate follows a logged metric."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def pair_loss(self, batch: Any) -> Tensor:
        first, second = (F.normalize(self.net(view), dim=1) for view in batch)
        near = first @ second.T / 0.5
        return F.cross_entropy(near, torch.arange(len(near)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pair_loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.pair_loss(batch)
        self.log_dict({"val_loss": loss, "worst": -loss})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "worst"}


class InOrder(Sampler[int]):
    """The order in which a study visits the samples."""

    def __init__(self, trial: Any) -> None:
        self.trial, self.epoch = trial, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(shoal.sample_order(self.trial, self.epoch, SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Losses(lightning.Callback):
    """The mean loss of the batches of each optimizer step, and the metrics of the last epoch."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int], list[float]] = {}
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = (trainer.current_epoch, batch_idx // trainer.accumulate_grad_batches)
        self.steps.setdefault(step, []).append(float(outputs["loss"]))  # its share of the step

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(trial: Any, module: Any, data: Data, *savers: Any, **settings: Any) -> tuple[Any, Losses]:
    """What Lightning trains for a trial."""
    data.setup("fit")
    loader = DataLoader(data.train, data.batch_size, sampler=InOrder(trial))
    seed_all(trial.seed, torch.device("cpu"))
    model = module(**{name: value for name, value in trial.config.items() if name not in ("batch_size", *settings)})
    losses = Losses()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=bool(savers),
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[losses, *savers],
        use_distributed_sampler=False, **settings,
    )  # fmt: skip
    trainer.fit(model, loader, data.val_dataloader())
    return model, losses


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> set[frozenset[int]]:
    """Trials that took training steps together."""
    found: set[frozenset[int]] = set()
    add = LossTracker.add

    def recording(self: LossTracker, runtimes: Any, losses: Tensor) -> None:
        add(self, runtimes, losses)
        found.add(frozenset(runtime.trial.number for runtime in runtimes))

    monkeypatch.setattr(LossTracker, "add", recording)
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Losses of all steps of each trial of the studies in this process."""
    found: dict[int, list[float]] = {}
    add = LossTracker.add

    def recording(self: LossTracker, runtimes: Any, losses: Tensor) -> None:
        add(self, runtimes, losses)
        for runtime, loss in zip(runtimes, losses.tolist(), strict=True):
            found.setdefault(runtime.trial.number, []).append(loss)

    monkeypatch.setattr(LossTracker, "add", recording)
    return found


def tune(
    task: LightningTask, space: dict[str, Any], path: Path, trials: int | None = None, epochs: int = EPOCHS
) -> Any:
    algorithm: Any = shoal.Grid(epochs=epochs) if trials is None else shoal.Random(trials, epochs=epochs)
    study = shoal.tune(
        task, space, metric="valid_loss", mode="min", algorithm=algorithm, devices="cpu:1", backend="inline",
        directory=path / "study", show_progress=False,
    )  # fmt: skip
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}, [row.reason for row in study.trials]
    return study


CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "classifier": (Classifier, Data, {"lr": shoal.choice([0.01, 0.1, 0.3])}, {}),
    "autoencoder": (Autoencoder, Data, {"lr": shoal.choice([0.01, 0.05])}, {}),
    "autoencoder, three batches a step": (
        Autoencoder, Data, {"lr": shoal.choice([0.01, 0.05])}, {"accumulate_grad_batches": 4},
    ),
    "transformer, one cycle": (Transformer, Data, {"lr": shoal.choice([0.02, 0.05])}, {}),
    "transformer, warm-up, accumulation and clipping": (
        Transformer, Data, {"lr": shoal.choice([0.02, 0.05]), "cycle": shoal.choice([False])},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.3},
    ),
    "a teacher, and clipping of one layer": (
        Distilled, Data, {"lr": shoal.choice([0.01, 0.1])}, {"gradient_clip_val": 0.3},
    ),
    "pair loss": (PairLoss, Pairs, {"lr": shoal.choice([0.1, 0.5])}, {}),
}  # fmt: skip


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("case", CASES)
def test_trials_learn_what_trainer_fit_teaches(case: str, recorded: dict[int, list[float]], tmp_path: Path) -> None:
    module, data, space, settings = CASES[case]
    study = tune(LightningTask(module, data(), max_epochs=EPOCHS, **settings), space, tmp_path)
    for row in study.trials:
        model, losses = fit(row.trial, module, data(), **settings)
        steps = EPOCHS * math.ceil(math.ceil(SAMPLES / SIZE) / settings.get("accumulate_grad_batches", 1))
        assert len(recorded[row.number]) == steps
        expected = [sum(of_step) for of_step in losses.steps.values()]
        torch.testing.assert_close(recorded[row.number], expected, rtol=1e-9, atol=1e-12)
        trained = study.model(row.number, "last").state_dict()
        torch.testing.assert_close(trained, model.state_dict(), rtol=1e-9, atol=1e-9)
        for name in {"val_loss", "accuracy", "val_error", "worst"} & losses.metrics.keys():
            assert row.metrics[name] == pytest.approx(losses.metrics[name], rel=1e-9)


def check_one_array(trials: list[Trial]) -> None:
    """Trials have one fusion key, and a step of them as an array gives each the loss of its step alone."""
    task = LightningTask(Classifier, Data())
    sets = DataSets(task, CPU)
    keys, failed, _ = SignatureBuilder(task, sets).find_keys(trials)
    assert not failed
    assert len(set(keys.values())) == 1
    batch = next(sets.of(trials[0].config)[0].iterate(next(iter(keys.values())).batch_size))

    def step(*some: Trial) -> Tensor:
        stepper = FusedStepper(task, [build(task, Member(each, 0, 1), CPU) for each in some])
        losses = stepper.train_step([batch] * len(some), [0] * len(some))
        assert not stepper.refusal
        return losses

    torch.testing.assert_close(step(*trials), torch.cat([step(each) for each in trials]), rtol=1e-9, atol=0)


def test_members_of_a_search_equal_their_lone_runs(groups: set[frozenset[int]], tmp_path: Path) -> None:
    """Two widths are two arrays, whose members differ in their learning rates and in `self.hparams`."""
    space = {"lr": shoal.choice([0.01, 0.1]), "width": shoal.choice([4, 8])}
    study = tune(LightningTask(Classifier, Data()), space, tmp_path)
    of_width = [{row.number for row in study.trials if row.config["width"] == width} for width in (4, 8)]
    assert all(any(group <= one for one in of_width) for group in groups), "how many train at once is measured"
    for numbers in of_width:
        check_one_array([row.trial for row in study.trials if row.number in numbers])
    for row in study.trials:
        assert study.rerun(row.number).largest < 1e-9
    assert type(study.best_model()) is Classifier
    assert study.best_model().hparams.lr == study.best_trial.config["lr"]


def test_the_config_reaches_the_class_of_the_data_module(tmp_path: Path) -> None:
    space = {"lr": 0.1, "batch_size": shoal.choice([4, 11])}
    study = tune(LightningTask(Classifier, Data), space, tmp_path)
    for row in study.trials:
        model, _ = fit(row.trial, Classifier, Data(row.config["batch_size"]))
        torch.testing.assert_close(
            study.model(row.number, "last").state_dict(), model.state_dict(), rtol=1e-9, atol=1e-9
        )


def test_settings_of_the_trainer_may_come_from_the_config(tmp_path: Path) -> None:
    space = {"lr": 0.02, "cycle": False, "gradient_clip_val": shoal.choice([0.1, 0.3])}
    study = tune(LightningTask(Transformer, Data()), space, tmp_path)
    for row in study.trials:
        model, _ = fit(row.trial, Transformer, Data(), gradient_clip_val=row.config["gradient_clip_val"])
        torch.testing.assert_close(
            study.model(row.number, "last").state_dict(), model.state_dict(), rtol=1e-9, atol=1e-9
        )


def test_an_exported_module_loads_with_its_source(tmp_path: Path) -> None:
    study = tune(LightningTask(Classifier, Data), {"lr": 0.1, "batch_size": 4}, tmp_path, trials=1, epochs=1)
    folder = study.export(0)
    assert (folder / "source" / Path(__file__).name).read_text() == Path(__file__).read_text()
    loaded = runpy.run_path(str(folder / "load.py"))["load"]()
    assert type(loaded) is Classifier
    torch.testing.assert_close(loaded.state_dict(), study.best_model().state_dict(), rtol=0, atol=0)


def test_schedules_and_counts_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Trials are promoted from one epoch to three: their epochs, steps and schedules continue."""
    for module, data in ((Autoencoder, Data()), (PairLoss, Pairs())):
        study = shoal.tune(
            LightningTask(module, data), {"lr": shoal.choice([0.01, 0.05, 0.1])}, metric="valid_loss", mode="min",
            algorithm=shoal.SuccessiveHalving(3, min_epochs=1, max_epochs=EPOCHS, eta=3), devices="cpu:1",
            backend="inline", directory=tmp_path / module.__name__, show_progress=False,
        )  # fmt: skip
        (row,) = [study.trials[each] for each in study.dataframe().query(f"epochs == {EPOCHS}").trial]
        model, _ = fit(row.trial, module, data)
        torch.testing.assert_close(
            study.model(row.number, "last").state_dict(), model.state_dict(), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize(
    ("max_epochs", "epochs", "said"),
    [
        (3, 27, r"LightningTask\(max_epochs=3\) plans .* have 27; .* or trials train on after the end of"),
        (27, 3, r"LightningTask\(max_epochs=27\) plans .* have 3; .* or trials end within it"),
        (3, 3, None),
        (None, 27, None),
    ],
)
def test_schedules_of_another_length_than_the_trials_are_said(
    max_epochs: int | None, epochs: int, said: str | None
) -> None:
    algorithm = shoal.SuccessiveHalving(3, max_epochs=epochs)
    algorithm.bind(Space({"lr": 0.1}), metric="valid_loss", mode="min", seed=0)
    warnings = study_warnings(LightningTask(Classifier, Data(), max_epochs=max_epochs), algorithm)
    assert len(warnings) == (said is not None)
    assert said is None or re.match(said, warnings[0])


class Gan(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class Collects(Classifier):
    def on_validation_epoch_start(self) -> None:
        pass

    def optimizer_step(self, *args: Any) -> None:
        pass


class Numbers(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            super().validation_step(batch, batch_idx)


class Alone(Classifier):
    validation_step = lightning.LightningModule.validation_step


class Plans(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1 / self.trainer.estimated_stepping_batches)


class Devices(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.trainer.strategy.lr)


class Warms(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer), "interval": "epoch"}]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear, "must be a subclass of LightningModule"),
        (Collects, "Collects defines on_validation_epoch_start, optimizer_step, .*ReportCheckpointCallback"),
        (Numbers, "Numbers.validation_step uses batch_idx"),
        (Alone, "Alone must define `validation_step`"),
    ],
)
def test_classes_without_an_equal_are_refused_by_name(module: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        LightningTask(module, Data())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"callbacks": object()},
            "takes no `callbacks`: of Lightning's a task takes EarlyStopping and ModelCheckpoint; ",
        ),
        ({"accelerator": "gpu"}, "takes no `accelerator`: a trial trains on one device; give `shoal.tune` devices="),
        (
            {"gradient_clip_algorithm": "value"},
            "takes no `gradient_clip_algorithm`: gradients are clipped by their norm",
        ),
        ({"train_dataloaders": []}, "takes no `train_dataloaders`: give a `datamodule`, such as"),
        ({"overfit_batches": 3}, "takes no `overfit_batches`: arrays have no equal.*ReportCheckpointCallback"),
        ({"precision": "64-true"}, r"precision='64-true' must be one of '32-true' .*self.double\(\)"),
        ({}, "`datamodule` must be a LightningDataModule, or its class, got None"),
    ],
)
def test_other_arguments_of_trainer_are_refused_with_a_remedy(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        LightningTask(Classifier, **given)


@pytest.mark.parametrize(
    ("given", "means"), [("32-true", "32"), (32, "32"), (16, "16-mixed"), ("bf16", "bf16-mixed"), ("16-mixed",) * 2]
)
def test_precisions_have_the_names_of_lightning(given: Any, means: str) -> None:
    task = LightningTask(Classifier, Data(), precision=given, gradient_clip_algorithm="norm")
    assert task.precision({}) == means


@pytest.mark.parametrize(
    ("module", "config", "said"),
    [
        (Gan, {}, "Gan sets automatic_optimization = False; .*ReportCheckpointCallback"),
        (TwoOptimizers, {}, "configure_optimizers returns 2 optimizers"),
        (Warms, {}, "ReduceLROnPlateau needs a `monitor`"),
        (Plans, {}, re.escape("give LightningTask(max_epochs=...)")),
        (Devices, {}, "the module uses trainer.strategy"),
        (Classifier, {"depth": 3}, "nothing takes 'depth' of the config: Classifier takes lr, width"),
    ],
)
def test_modules_without_an_equal_are_refused_by_name(module: Any, config: Any, said: str) -> None:
    task = LightningTask(module, Data())
    with pytest.raises(TaskError, match=said):
        task.optimizer(task.model(config), config)


class Several(Data):
    def val_dataloader(self) -> Any:
        return [DataLoader(self.valid, SIZE)] * 2


class Transfers(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


class Endless(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), SIZE)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            Endless,
            "`train_dataloader` has no length, as object of type 'Rows' has no .*; give its data set a `__len__`",
        ),
        (Several, "`val_dataloader` must return one DataLoader, got list"),
        (Transfers, "Transfers defines on_after_batch_transfer"),
    ],
)
def test_loaders_without_an_equal_are_refused_by_name(data: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        LightningTask(Classifier, data()).data({})


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ({"reduce_fx": "sum"}, "only means are reported"),
        ({"batch_size": 7}, "means are weighted by the samples of the batch, 6"),
    ],
)
def test_logs_that_are_not_means_are_refused(logged: dict[str, Any], said: str) -> None:
    class Logs(Classifier):
        def validation_step(self, batch: Any) -> None:
            self.log("val_loss", batch[0].sum(), **logged)

    task = LightningTask(Logs, Data())
    model = task.model({})
    task.optimizer(model, {})
    with pytest.raises(TaskError, match=said):
        task.loss(model.eval(), [X[:6], Y[:6]])


def test_a_failing_monitor_names_what_is_logged(tmp_path: Path) -> None:
    class Follows(PairLoss):
        def configure_optimizers(self) -> Any:
            return {**super().configure_optimizers(), "monitor": "val_acc"}

    with pytest.raises(ShoalError, match="monitors 'val_acc', which validation_step does not log"):
        tune(LightningTask(Follows, Pairs()), {"lr": 0.1}, tmp_path, trials=1)
