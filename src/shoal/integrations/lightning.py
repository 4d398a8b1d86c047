"""An untouched LightningModule as a task whose trials train as arrays, and a callback for functions that train one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.algorithms.rules import StopRule
from shoal.core.errors import TaskError
from shoal.core.objective import Objective
from shoal.core.plain import plain
from shoal.core.trial import Config
from shoal.integrations.early_stopping import rules_for
from shoal.integrations.lightning_module import (
    BATCHES,
    REMEDY,
    EpochMetrics,
    check_class,
    check_module,
    find_metrics,
    parameters_of,
    stand_ins,
    uses,
)
from shoal.integrations.lightning_trainer import (
    Length,
    Schedules,
    ValidationLog,
    attached,
    check_others,
    parsed,
    precision_of,
    taken_callbacks,
)
from shoal.integrations.optional import check_installed, numbers
from shoal.programs.trainable import checkpoint, report
from shoal.task import Task, size_of

try:
    from lightning.pytorch import Callback
except ImportError:  # the constructor of the callback says what to install
    Callback = object

__all__ = ["LightningReportCallback", "LightningTask", "ReportCheckpointCallback"]

_Pair = tuple[DataLoader[Any], DataLoader[Any]]

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of a data module that have no equal."""

_FOUND = "_shoal_found"
"""Attribute of a model between `loss` and `outputs` of a validation batch: the batch and what `_validated` returned."""

_LOSSES = ("valid_loss", "val_loss", "valid/loss", "val/loss", "validation_loss")


class LightningTask(Task):
    """Training of a LightningModule as by Lightning's `Trainer.fit`, for each config of a search.

    Values of the config are keyword arguments of the module's `__init__`, and of `datamodule` if that is a class or a
    function. The names `accumulate_grad_batches`, `gradient_clip_val` and `precision` override the arguments below for
    the trial, unless the module takes them. A name that nothing takes is refused.

    `training_step`, `validation_step`, `configure_optimizers` with schedules per step or per epoch, `self.log`,
    `self.hparams`, `self.global_step`, `self.current_epoch` and `self.trainer.estimated_stepping_batches` are as under
    `Trainer`. What is logged in `validation_step` is reported, averaged over the validation set by batch size.
    What is logged in `training_step` is not. `valid_loss` is what `validation_step` returns; if that is not a loss, the
    metric that it logs as val_loss, valid_loss, validation_loss, val/loss or valid/loss.

    In `training_step`, `global_step`, `current_epoch` and `batch_idx` are integer tensors without axes, whose products
    with Python's floats are of torch's default type. A step that branches on one of them is neither fused nor compiled;
    one that computes with them is.

    Metrics of torchmetrics, and collections of them, may be attributes of the module. `validation_step` calls or
    updates them and logs them, or `on_validation_epoch_end` computes, logs and resets them. The arguments of their
    calls are kept until the end of the validation; then each trial computes its own on the CPU. In `training_step` they
    do nothing.

    Refused by name, since arrays have no equal: manual optimization, several optimizers, and all hooks but the above
    (`on_train_epoch_end`, `optimizer_step`, `configure_callbacks`, `setup` ...). Train such a module in a function for
    `shoal.tune`, with a ReportCheckpointCallback. Callbacks, loggers and devices of a Trainer are the study's.
    `callbacks=[EarlyStopping(...)]` is `shoal.Patience` where it monitors the metric of the study, and
    `ModelCheckpoint(monitor=..., mode=...)` is `best_by` of `shoal.tune`: what decides the best epoch of a trial, by
    whose values it ranks and whose weights its model has.

    Args:
        module: Subclass of LightningModule.
        datamodule: LightningDataModule; or its class, or a function that returns one, with values of the config as
            keyword arguments. Its loaders are what `Task.data` accepts; the study determines the order of shuffle=True.
        max_epochs: Epochs for which schedules are planned (`estimated_stepping_batches`, `trainer.max_epochs`). The
            algorithm of the study decides how long a trial trains.
        accumulate_grad_batches: Batches of an optimizer step.
        gradient_clip_val: Largest norm of the gradients, or None.
        precision: "32-true", "bf16-mixed" or "16-mixed", or Lightning's other names of these: 32, "bf16", 16.
        others: Arguments of `Trainer` that a study does not take; each is refused with a remedy.

    Raises:
        TaskError: The module or an argument cannot be honoured.
    """

    scheduler_interval: Literal["epoch", "step"] = "step"

    _keeps_train_modes = True  # as Lightning's trainer does

    def __init__(
        self,
        module: type[nn.Module],
        datamodule: Any = None,
        *,
        max_epochs: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        precision: str | int = "32-true",
        **others: Any,
    ) -> None:
        self._early_stops, self._best = taken_callbacks(others.pop("callbacks", None))
        check_others(others)
        precision_of(precision)
        check_class(module)
        max_epochs = plain(max_epochs)
        if max_epochs is not None and (not isinstance(max_epochs, int) or max_epochs < 1):
            raise TaskError(f"`max_epochs` must be a positive integer or None, got {max_epochs!r}")
        self.module = module
        self.datamodule = datamodule
        self.max_epochs = max_epochs
        self.settings: dict[str, Any] = {
            "accumulate_grad_batches": accumulate_grad_batches,
            "gradient_clip_val": gradient_clip_val,
            "precision": precision,
        }
        self._names, self._any_name = parameters_of(module)
        self._loaders = _Loaders(datamodule)
        self._epoch = EpochMetrics()

    def data(self, config: Config) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return the loaders of the data module."""
        return self._loaders.of(config)

    def accumulate(self, config: Config) -> int:
        """Return `accumulate_grad_batches`."""
        return cast("int", self._setting("accumulate_grad_batches", config))

    def clip_norm(self, config: Config) -> float | None:
        """Return `gradient_clip_val`, or None if it is 0."""
        return self._setting("gradient_clip_val", config) or None

    def precision(self, config: Config) -> str:
        """Return `precision`, in the words of `Task.precision`."""
        return precision_of(self._setting("precision", config))

    def model(self, config: Config) -> nn.Module:
        """Return a new module."""
        self._check_names(config)
        given = self._given(config)
        model = self.module(**given)
        metrics = find_metrics(model)
        check_module(model, bool(metrics))
        self._epoch.keep(given, metrics)
        model.register_buffer(BATCHES, torch.zeros((), dtype=torch.int64), persistent=False)
        return model

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        """Return the optimizer of `configure_optimizers`, whose schedulers `scheduler` returns."""
        length = self._length(config)
        with attached(model, length, _ignore):
            returned = cast("Any", model).configure_optimizers()
        found = parsed(returned, model, length)
        if self.clip_norm(config) is not None:  # Lightning clips those of the optimizer
            own = {id(each) for group in found.param_groups for each in group["params"]}
            for each in model.parameters():
                each.requires_grad_(each.requires_grad and id(each) in own)
        return found

    def scheduler(self, optimizer: Any, config: Config) -> Any:
        """Return the schedulers of `configure_optimizers`."""
        return Schedules.of(optimizer)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of `training_step`, or of `validation_step` in evaluation mode."""
        if not model.training:
            return self._validation_loss(model, batch)
        with attached(model, None, _ignore, stand_ins(model, self._epoch)) as trainer:
            index = trainer.batch_idx if uses(self.module, "training_step", "batch_idx") else 0
            returned = _call_step(model, "training_step", batch, index)
        model.get_buffer(BATCHES).add_(1)
        loss = returned["loss"] if isinstance(returned, Mapping) and "loss" in returned else returned
        if not isinstance(loss, Tensor):
            raise TaskError(
                f"{self.module.__name__}.training_step must return a loss, or a dict with 'loss', got {returned!r}; a "
                f"step that skips batches cannot be an array. {REMEDY}"
            )
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return what `validation_step` logs, without metrics of torchmetrics."""
        own, found = vars(model).pop(_FOUND, (None, None))
        if own is not batch:
            found = self._validated(model, batch)
        vars(model)[_FOUND] = (batch, found)
        return {name: value for name, value in found[1].items() if name != "valid_loss"}

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Return the calls of the metrics of torchmetrics in `validation_step`, if the module holds any."""
        own, found = vars(model).pop(_FOUND, (None, None))
        if own is not batch:
            found = self._validated(model, batch)
        return found[2]

    def evaluate(self, outputs: list[Any], config: Config) -> Mapping[str, float]:
        """Return the values of the metrics of torchmetrics over the validation set."""
        return self._epoch.values(self.module, self._given(config), outputs)

    def _validation_loss(self, model: nn.Module, batch: Any) -> Tensor:
        returned, logged, _ = found = self._validated(model, batch)
        vars(model)[_FOUND] = (batch, found)
        loss = returned["loss"] if isinstance(returned, Mapping) and "loss" in returned else returned
        if not isinstance(loss, Tensor):
            loss = next((logged[name] for name in _LOSSES if name in logged), None)
        if not isinstance(loss, Tensor):
            raise TaskError(
                f"{self.module.__name__}.validation_step returns no loss and logs none of {', '.join(_LOSSES)}, got "
                f"{', '.join(logged) or 'nothing'}; return the loss"
            )
        return loss

    def _validated(self, model: nn.Module, batch: Any) -> tuple[Any, dict[str, Any], Any]:
        """Return what `validation_step` returns and logs, and what `EpochMetrics.values` needs of the batch."""
        log, metrics = ValidationLog(batch), stand_ins(model, self._epoch)
        with attached(model, None, log, metrics):
            returned = _call_step(model, "validation_step", batch, 0)
        calls = {name: each.calls for name, each in metrics.items()}
        recorded = {"samples": size_of(batch), "calls": calls, "logged": log.metrics} if metrics else None
        return returned, log.values, recorded

    def _weigh(self, batches: Sequence[Any], accumulate: int, micro_batches: int = 1) -> Sequence[tuple[Any, float]]:
        return [(batch, 1 / accumulate) for batch in batches]

    def _study_warnings(self, objectives: Sequence[Objective], longest: int | None, config: Config) -> list[str]:
        planned = self.max_epochs
        if longest is None or planned is None or longest == planned:
            return []
        consequence = "train on after the end of such a schedule" if longest > planned else "end within it"
        return [
            f"LightningTask(max_epochs={planned}) plans schedules that read it for {planned} epochs, and the longest "
            f"trials of the study have {longest}; give both the same number, or trials {consequence}"
        ]

    def _best_epoch(self) -> tuple[str, Objective] | None:
        return self._best

    def _stop_rules(self, objectives: Sequence[Objective]) -> list[StopRule]:
        return rules_for(self._early_stops, objectives)

    def _length(self, config: Config) -> Length:
        return Length(len(self._loaders.of(config)[0]), self.accumulate(config), self.max_epochs)

    def _given(self, config: Config) -> dict[str, Any]:
        return {name: value for name, value in config.items() if self._is_argument(name)}

    def _is_argument(self, name: str) -> bool:
        return name in self._names or (self._any_name and name not in self.settings and name not in self._loaders.names)

    def _setting(self, name: str, config: Config) -> Any:
        return self.settings[name] if self._is_argument(name) else config.get(name, self.settings[name])

    def _check_names(self, config: Config) -> None:
        unknown = [
            name
            for name in config
            if not (self._is_argument(name) or name in self.settings or self._loaders.takes(name))
        ]
        if unknown:
            raise TaskError(
                f"nothing takes {', '.join(map(repr, unknown))} of the config: {self.module.__name__} takes "
                f"{', '.join(self._names) or 'no arguments'}; make it an argument of the module's `__init__`, or give "
                "the class of the data module instead of an object if it is an argument of that"
            )


def _call_step(model: Any, name: str, batch: Any, index: Any) -> Any:
    step: Callable[..., Any] = getattr(model, name)
    names, _ = parameters_of(step)
    return step(batch, index) if len(names) > 1 or not names else step(batch)


def _ignore(*_: Any, **__: Any) -> None:
    """Takes the place of `self.log` in training."""


class _Loaders:
    """Training and validation loaders of a data module, made once in a process for equal arguments."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._is_made = not isinstance(given, type) and hasattr(given, "train_dataloader")
        if not self._is_made and not callable(given):
            raise TaskError(f"`datamodule` must be a LightningDataModule, or its class, got {given!r}")
        self.names, self._any_name = ([], False) if self._is_made else parameters_of(given)
        self._made: dict[str, _Pair] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": {}}

    def takes(self, name: str) -> bool:
        """Whether a name of the config is an argument of the data module."""
        return name in self.names or self._any_name

    def of(self, config: Config) -> _Pair:
        """The loaders of a config, of which only the arguments of the data module are read."""
        names = [*config] if self._any_name else self.names
        arguments = {name: config[name] for name in names if name in config}
        key = repr(arguments)
        if key not in self._made:
            self._made[key] = _loaded(self._given if self._is_made else self._given(**arguments))
        return self._made[key]


def _loaded(module: Any) -> _Pair:
    base = next((x for x in type(module).__mro__ if x.__name__ == "LightningDataModule"), None)
    wrong = [name for name in _HOOKS if base and getattr(type(module), name) is not getattr(base, name)]
    if wrong:
        raise TaskError(f"{type(module).__name__} defines {', '.join(wrong)}, which arrays do not call. {REMEDY}")
    module.prepare_data()
    module.setup("fit")
    return _checked("train_dataloader", module.train_dataloader()), _checked("val_dataloader", module.val_dataloader())


def _checked(name: str, loader: Any) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise TaskError(f"`{name}` must return one DataLoader, got {type(loader).__name__}. {REMEDY}")
    try:
        len(loader)
    except TypeError as error:
        raise TaskError(f"`{name}` has no length, as {error}; give its data set a `__len__`. {REMEDY}") from error
    return loader


class LightningReportCallback(Callback):  # type: ignore[misc]  # its base has no types here
    """Saves a Lightning checkpoint and reports `trainer.callback_metrics` after each validation of `Trainer.fit`.

    Budgets count validations. If the trial must stop, the report ends the function, so `fit` does not return. The
    sanity check and `Trainer.validate` are not reported. In a training on several processes the first one reports.

    Import it as `shoal.integrations.lightning.ReportCheckpointCallback`.

    Example:
        A training function that continues from its checkpoint::

            def train(config):
                callback = ReportCheckpointCallback()
                trainer = Trainer(max_epochs=20, callbacks=[callback], enable_checkpointing=False, logger=False)
                trainer.fit(Model(config), data, ckpt_path=callback.ckpt_path)

    Raises:
        ShoalError: Lightning is not installed.
    """

    def __init__(self) -> None:
        check_installed("lightning", "ReportCheckpointCallback")
        super().__init__()

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint to continue from, for `Trainer.fit(ckpt_path=...)`; None if there is none.

        Raises:
            ShoalError: The program runs outside of a study.
        """
        path = checkpoint() / "lightning.ckpt"
        return str(path) if path.exists() else None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, then report.

        Raises:
            TaskError: No metric was logged.
            TrainingStopped: The trial stops now.
        """
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        trainer.save_checkpoint(checkpoint() / "lightning.ckpt")
        if trainer.is_global_zero:
            report(numbers(trainer.callback_metrics))


ReportCheckpointCallback = LightningReportCallback
