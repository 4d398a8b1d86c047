"""What a Trainer does for a LightningModule that a study trains: its attributes, its log, and its LR schedulers."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.algorithms.rules import Patience
from shoal.core.errors import TaskError
from shoal.core.objective import Objective
from shoal.integrations.early_stopping import EarlyStop, are_callbacks
from shoal.integrations.lightning_module import BATCHES, REMEDY, MetricCall, MetricStandIn
from shoal.task import size_of

__all__ = [
    "Length",
    "Schedules",
    "TrainerView",
    "ValidationLog",
    "attached",
    "check_others",
    "parsed",
    "precision_of",
    "taken_callbacks",
]

_LENGTH = "_shoal_length"

_DEVICES = "a trial trains on one device; give `shoal.tune` devices=..."
_LOADERS = "give a `datamodule`, such as LightningDataModule.from_datasets(train_dataset, val_dataset)"
_OWN = "a study has its own; leave it out"
_LOGS = "give `shoal.tune` callbacks=[...], such as WandbCallback"
_CALLBACKS = (
    "of Lightning's a task takes EarlyStopping and ModelCheckpoint; callbacks=[...] of `shoal.tune`, such as "
    "WandbCallback, follow the study, and its algorithm stops trials, too"
)
_EPOCHS = "the algorithm of the study decides how long a trial trains: algorithm=shoal.Random(n, epochs=...)"
_OTHERS = {
    "gradient_clip_algorithm": "gradients are clipped by their norm",
    "callbacks": _CALLBACKS,
    "logger": _LOGS,
    **dict.fromkeys(("accelerator", "devices", "num_nodes", "strategy"), _DEVICES),
    **dict.fromkeys(("train_dataloader", "train_dataloaders", "val_dataloaders"), _LOADERS),
    **dict.fromkeys(("max_steps", "max_time", "min_epochs", "min_steps"), _EPOCHS),
    **dict.fromkeys(("default_root_dir", "deterministic", "enable_checkpointing", "enable_model_summary"), _OWN),
    **dict.fromkeys(("enable_progress_bar", "log_every_n_steps", "num_sanity_val_steps"), _OWN),
}
"""Arguments of `Trainer` and of `fit` that are refused, with a remedy."""

_SAVES = "study.best_model() and study.model(number) have the weights, from the directory of the study; leave it out"
_EPOCH = "a study compares all epochs of a trial, and saves each checkpoint_seconds of `shoal.tune`; leave it out"
_CHECKPOINT: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    (
        *("save_top_k", "save_top_k", (0, 1)),
        "a trial keeps the weights of its best epoch and of the newest one; give save_top_k=1. How many trials keep "
        "theirs is keep= of `shoal.tune`",
    ),
    ("every_n_train_steps", "_every_n_train_steps", (0,), _EPOCH),
    ("train_time_interval", "_train_time_interval", (None,), _EPOCH),
    ("every_n_epochs", "_every_n_epochs", (0, 1), _EPOCH),
    ("dirpath", "dirpath", (None,), _SAVES),
    ("filename", "filename", (None,), _SAVES),
)
"""Argument of `ModelCheckpoint`, its attribute, values that a study takes, and the remedy for others."""

_PRECISIONS = {"32-true": "32", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Names of Lightning -> names of `Task.precision`, where they differ."""


@dataclass(frozen=True)
class Length:
    """Length of a training.

    Args:
        accumulate: Batches of an optimizer step.
        max_epochs: Epochs for which schedules are planned; None if not given.
    """

    batches: int
    accumulate: int
    max_epochs: int | None

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(self.batches / self.accumulate)

    def batches_before(self, step: int) -> int:
        """Batches before an optimizer step, counted from the start of the training."""
        epoch, within = divmod(step, self.steps)
        return epoch * self.batches + within * self.accumulate


def check_others(others: Mapping[str, Any]) -> None:
    """Check the arguments of `Trainer` that a study does not take."""
    for name, value in others.items():
        if (name, value) != ("gradient_clip_algorithm", "norm"):
            raise TaskError(f"LightningTask takes no `{name}`: {_OTHERS.get(name, f'arrays have no equal. {REMEDY}')}")


def taken_callbacks(callbacks: Any) -> tuple[list[EarlyStop], tuple[str, Objective] | None]:
    """The stop rules, and the keeper of the best epoch in words and as an objective, in callbacks of `Trainer`.

    Raises:
        TaskError: A callback is another than `EarlyStopping` or `ModelCheckpoint`, or has no equal.
    """
    callbacks = callbacks or []
    callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    if not are_callbacks(callbacks, "EarlyStopping", "ModelCheckpoint"):
        check_others({"callbacks": callbacks})
    savers = [each for each in callbacks if are_callbacks([each], "ModelCheckpoint")]
    kept = dict.fromkeys(found for each in savers if (found := _kept_epoch(each)) is not None)
    if len(kept) > 1:
        raise TaskError(
            f"LightningTask takes one ModelCheckpoint with a monitor, got {' and '.join(shown for shown, _ in kept)}: "
            "a trial keeps the weights of one best epoch, and those of the newest"
        )
    return _early_stops([each for each in callbacks if each not in savers]), next(iter(kept), None)


def _kept_epoch(callback: Any) -> tuple[str, Objective] | None:
    """The rule by which a `ModelCheckpoint` keeps the best epoch, in words and as an objective; None if it has none."""
    shown = f"ModelCheckpoint(monitor={callback.monitor!r}, mode={callback.mode!r})"
    for name, attribute, values, remedy in _CHECKPOINT:
        if (value := getattr(callback, attribute)) not in values:
            raise TaskError(f"LightningTask takes no {name}={value!r} of {shown}: {remedy}")
    if callback.monitor is None or 0 in (callback.save_top_k, callback._every_n_epochs):
        return None
    return shown, Objective(callback.monitor, callback.mode)


def _early_stops(callbacks: list[Any]) -> list[EarlyStop]:
    found = []
    for each in callbacks:
        shown = f"EarlyStopping(monitor={each.monitor!r})"
        for name in ("stopping_threshold", "divergence_threshold"):
            if getattr(each, name) is not None:
                raise TaskError(
                    f"LightningTask takes no {name} of {shown}; give `shoal.tune` target=... or "
                    "stop=[shoal.Threshold(...)]"
                )
        rule = Patience(each.patience, abs(float(each.min_delta)))  # it has its sign of the mode
        found.append(EarlyStop(shown, Objective(each.monitor, each.mode), rule))
    return found


def precision_of(given: str | int) -> str:
    """Return a precision of Lightning in the words of `Task.precision`."""
    found = _PRECISIONS.get(str(given), str(given))
    if found not in ("32", "16-mixed", "bf16-mixed"):
        raise TaskError(
            f"precision={given!r} must be one of '32-true' (or 32), '16-mixed' (or 16) and 'bf16-mixed' (or 'bf16'); "
            "for weights of another type convert the module in its `__init__`, as by self.double(), and the samples in "
            "the data module"
        )
    return found


class TrainerView:
    """Stands for the Trainer of a module within one call of it; a module that reads anything else of it is refused."""

    logger = None
    progress_bar_callback = None
    is_global_zero = True
    sanity_checking = barebones = fast_dev_run = False
    world_size = num_devices = num_nodes = 1
    global_rank = local_rank = 0

    def __init__(self, model: nn.Module, length: Length) -> None:
        self._model = model
        self._length = length
        self.loggers: list[Any] = []
        self.num_training_batches = length.batches
        self.accumulate_grad_batches = length.accumulate
        self.training = model.training
        self.validating = not model.training

    @property
    def max_epochs(self) -> int:
        """Epochs for which schedules are planned."""
        if self._length.max_epochs is None:
            raise TaskError(
                "the module reads the length of its training (trainer.estimated_stepping_batches or "
                "trainer.max_epochs), which the algorithm of a study decides; give LightningTask(max_epochs=...), the "
                "epochs over which schedules are planned"
            )
        return self._length.max_epochs

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of `max_epochs` epochs."""
        return self.max_epochs * self._length.steps

    @property
    def batch_idx(self) -> Tensor:
        """Number of the training batch in its epoch, int64 without axes."""
        return self._batches % self._length.batches

    @property
    def current_epoch(self) -> Tensor:
        """Number of the epoch, int64 without axes; in a validation that of the epoch before it."""
        done = self._batches if self.training else (self._batches - 1).clamp(min=0)
        return done // self._length.batches

    @property
    def global_step(self) -> Tensor:
        """Optimizer steps so far, int64 without axes."""
        whole, within = self._batches // self._length.batches, self._batches % self._length.batches
        return whole * self._length.steps + within // self._length.accumulate

    @property
    def _batches(self) -> Tensor:
        return self._model.get_buffer(BATCHES)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(f"the module uses trainer.{name}, which arrays do not have. {REMEDY}")


class ValidationLog:
    """Takes the place of `self.log` in a validation step.

    Raises:
        TaskError: A value is logged in a way that has no equal.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.values: dict[str, Any] = {}
        """Values logged for the epoch, by name."""
        self.metrics: dict[str, dict[str, int | None]] = {}
        """Logged name -> name of a metric of torchmetrics -> number of its call, or None for its value of the epoch."""

    def __call__(
        self,
        name: str,
        value: Any,
        *args: Any,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        """Keep a value; the other arguments concern loggers and several processes."""
        if reduce_fx not in ("mean", torch.mean):
            raise TaskError(f"self.log({name!r}, reduce_fx={reduce_fx!r}): only means are reported; log a mean")
        if isinstance(value, (MetricCall, MetricStandIn)):
            if on_epoch is not False:
                self.metrics[name] = {value.name: value.index if isinstance(value, MetricCall) else None}
            return
        if not isinstance(value, (Tensor, int, float)):
            raise TaskError(
                f"self.log({name!r}, ...) is given {type(value).__name__}; log a tensor or a number. {REMEDY}"
            )
        if batch_size is not None and batch_size != (size := size_of(self._batch)):
            raise TaskError(
                f"self.log({name!r}, batch_size={batch_size}): means are weighted by the samples of the batch, {size}"
            )
        if on_epoch is not False:
            if isinstance(value, Tensor):
                value = value.detach().reshape(()) if value.dim() else value.detach()
            self.values[name] = value


def _log_dict(log: Callable[..., None], dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    for name, value in dictionary.items():
        log(name, value, *args, **kwargs)


@contextmanager
def attached(
    model: nn.Module, length: Length | None, log: Callable[..., None], metrics: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[TrainerView]:
    """Within, the module has a Trainer, and logs to `log`.

    Args:
        length: Length of the training, which the module keeps; None if it has one.
        metrics: Take the places of the module's attributes of their names.
    """
    own = vars(model)
    if length is not None:
        own[_LENGTH] = length
    view = TrainerView(model, own[_LENGTH])
    own.update(metrics, log=log, log_dict=partial(_log_dict, log), _trainer=view)
    try:
        yield view
    finally:
        for name in ("log", "log_dict", *metrics):
            del own[name]
        own["_trainer"] = None


_made: "WeakKeyDictionary[Optimizer, Schedules]" = WeakKeyDictionary()
"""Optimizer -> its schedulers, until `LightningTask.scheduler` takes them."""


@dataclass(frozen=True)
class _Scheduled:
    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None

    @property
    def follows_metric(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)


class Schedules:
    """The LR schedulers of one optimizer, and the count of its module's batches."""

    def __init__(self, schedulers: list[_Scheduled], model: nn.Module, length: Length) -> None:
        self._schedulers = schedulers
        self._model = model
        self._length = length
        self._steps = 0

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Schedules":
        """The schedulers that were returned with an optimizer."""
        return _made.pop(optimizer)

    def step(self) -> None:
        """Count an optimizer step. As in Trainer, `frequency` of a scheduler per step counts batches of the epoch."""
        self._steps += 1
        within = self._steps % self._length.steps
        batches = within * self._length.accumulate if within else self._length.batches
        for each in self._schedulers:
            if each.interval == "step" and batches % each.frequency == 0:
                each.scheduler.step()

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers per epoch, with the means of a validation."""
        epoch = self._steps // self._length.steps
        for each in self._schedulers:
            if each.interval != "epoch" or epoch % each.frequency:
                continue
            if not each.follows_metric:
                each.scheduler.step()
            elif each.monitor is not None and each.monitor in metrics:
                each.scheduler.step(metrics[each.monitor])
            else:
                raise TaskError(
                    f"ReduceLROnPlateau monitors {each.monitor!r}, which validation_step does not log; it logs "
                    f"{', '.join(metrics)}"
                )
        self._set_count()

    def state_dict(self) -> dict[str, Any]:
        """Steps, and the states of the schedulers."""
        return {"steps": self._steps, "schedulers": [each.scheduler.state_dict() for each in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._steps = state["steps"]
        for each, saved in zip(self._schedulers, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(saved)
        self._set_count()

    def _set_count(self) -> None:
        self._model.get_buffer(BATCHES).fill_(self._length.batches_before(self._steps))


def parsed(returned: Any, model: nn.Module, length: Length) -> Optimizer:
    """The optimizer that `configure_optimizers` returned; its schedulers are kept for `Schedules.of`."""
    where = f"{type(model).__name__}.configure_optimizers"
    schedulers: list[Any] = []
    monitor: Any = None
    match returned:
        case [[*optimizers], [*schedulers]] | [[*optimizers], schedulers] if all(
            isinstance(one, Optimizer) for one in optimizers
        ):
            schedulers = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
        case {"optimizer": one, **others} | [{"optimizer": one, **others}]:
            optimizers, monitor = [one], others.get("monitor")
            schedulers = [others["lr_scheduler"]] if others.get("lr_scheduler") is not None else []
        case [*optimizers]:
            pass
        case _:
            optimizers = [returned]
    if len(optimizers) != 1:
        raise TaskError(f"{where} returns {len(optimizers)} optimizers, and arrays have one. {REMEDY}")
    if not isinstance(optimizers[0], Optimizer):
        raise TaskError(f"{where} must return a torch.optim.Optimizer, got {returned!r}")
    found = [_scheduled(one, monitor, where) for one in schedulers]
    if any(each.scheduler.optimizer is not optimizers[0] for each in found):
        raise TaskError(f"{where} returns a scheduler of another optimizer than the one that it returns")
    _made[optimizers[0]] = Schedules(found, model, length)
    return optimizers[0]


def _scheduled(given: Any, monitor: Any, where: str) -> _Scheduled:
    settings = dict(given) if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
    known = ("scheduler", "interval", "frequency", "monitor")
    found = _Scheduled(**{name: settings[name] for name in known if name in settings})
    if not isinstance(found.scheduler, LRScheduler):
        raise TaskError(
            f"{where} must return schedulers of torch.optim.lr_scheduler, got {found.scheduler!r}. {REMEDY}"
        )
    if found.interval not in ("step", "epoch") or not isinstance(found.frequency, int) or found.frequency < 1:
        raise TaskError(
            f"{where}: `interval` must be 'step' or 'epoch' and `frequency` a positive integer, got "
            f"{found.interval!r} and {found.frequency!r}"
        )
    if found.follows_metric and (found.interval == "step" or found.monitor is None):
        raise TaskError(f"{where}: ReduceLROnPlateau needs a `monitor` and the interval 'epoch'")
    return found
