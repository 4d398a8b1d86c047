"""A trial in a worker: its model, optimizer, LR scheduler and progress, and checks of what the task returns."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree

from shoal.core.array import Member
from shoal.core.errors import CheckpointError, TaskError, UnusableTaskError
from shoal.core.trial import Report, Trial
from shoal.fuse.checks import list_names
from shoal.fuse.frozen import base_fingerprint, load_own_state, own_state
from shoal.fuse.generators import seed_all
from shoal.fuse.optim.unfused_step import mode_setter, required_argument
from shoal.fuse.scaler import LossScale
from shoal.task import Task, call, check_interval
from shoal.train.bases import bases_of, check_base, move
from shoal.train.best_epoch import BestEpoch
from shoal.train.carried_state import CarriedState, Lost
from shoal.train.checkpoint import Checkpoint, CheckpointWriter, Weights, load_newest, metrics_of, mismatch_message
from shoal.train.checkpoint_paths import checkpoint_directory, checkpoint_stem
from shoal.train.kept_gradients import KeptGradients, uncleared
from shoal.train.step_settings import StepSettings

__all__ = [
    "TrialRuntime",
    "build",
    "check_model",
    "check_optimizer",
    "check_scalar",
    "optimizers_in",
    "parameter_warning",
    "sort_by_optimizer",
    "state_tensors",
    "synchronize",
    "train_modes_kept",
]

_log = logging.getLogger("shoal.train")

_returned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Id -> tensor, for all tensors that training changes of live models which tasks have returned in this process."""


@dataclass(eq=False)
class TrialRuntime:
    """State of a trial in training.

    Args:
        optimizer: Optimizer of the task; several in a list, tuple or dict, if the task has its own `step`.
        scheduler: LR scheduler of the task, several as for the optimizer, or None.
        by_step: Whether schedulers step after each training step instead of after each epoch.
        failure: Reason for which the trial fails at the end of its epoch, or "".
        average: Moving averages of the trained parameters by name; empty before the first step, or without `Task.ema`.
        carried: State outside of state dicts; None for a copy, which is not saved.
        gradients: Gradients that a step leaves for the next one.
        errors: Standard errors of the means of the last validation, by metric.
    """

    member: Member
    model: nn.Module
    optimizer: Any
    scheduler: Any
    device: torch.device
    settings: StepSettings
    gradients: KeptGradients
    by_step: bool = False
    epoch: int = 0
    step: int = 0
    reports: list[Report] = field(default_factory=list)
    failure: str = ""
    saved: tuple[int, int] = (0, 0)
    proven: tuple[int, int] = (0, 0)
    """Epoch and step until which the training is known to be right: that of the last check, or of the restore."""
    average: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: LossScale | None = None
    carried: CarriedState | None = None
    lossy: bool = False
    """Whether a checkpoint lacked what could not be pickled."""
    best: BestEpoch = field(default_factory=BestEpoch)
    base: str = ""
    """`base_fingerprint` of the model."""
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def trial(self) -> Trial:
        """The trial in training."""
        return self.member.trial

    @property
    def checkpoint(self) -> str:
        """Beginning of the name of the newest checkpoint, as in `Report`; "" before the first."""
        return "" if self.saved == (0, 0) else checkpoint_stem(*self.saved)

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Function that returns a context in which the model runs in the precision of the trial."""
        return partial(self.settings.autocast, self.device)

    def end_step(self) -> None:
        """Count a training step, and step an LR scheduler that steps after each training step."""
        self.step += 1
        if self.by_step:
            self._step_schedulers({})

    def end_epoch(self, metrics: dict[str, float], seconds: float) -> Report:
        """Count an epoch, step an LR scheduler that steps after each epoch, and add and return the report."""
        self.epoch, self.step, self.failure = self.epoch + 1, 0, ""
        self._end_epoch_of_schedulers(metrics)
        self.reports.append(Report(self.trial.number, self.epoch, metrics, seconds, errors=self.errors))
        return self.reports[-1]

    def _replay_steps(self, steps: int) -> None:
        if self.by_step:
            for _ in range(steps):
                self._step_schedulers({})

    def _end_epoch_of_schedulers(self, metrics: Mapping[str, float]) -> None:
        """Step schedulers that step after each epoch; call `end_epoch(metrics)` of others that have such a method."""
        if not self.by_step:
            self._step_schedulers(metrics)
            return
        for scheduler in pytree.tree_leaves(self.scheduler):
            if end_epoch := getattr(scheduler, "end_epoch", None):
                end_epoch(metrics)

    def _step_schedulers(self, metrics: Mapping[str, float]) -> None:
        for scheduler in pytree.tree_leaves(self.scheduler):
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(metrics["valid_loss"])
            elif scheduler is not None:
                scheduler.step()

    def set_train_mode(self, train: bool) -> None:
        """Set the model, and optimizers that have modes, to training or evaluation mode.

        A model that keeps its modes is not set to training mode.
        """
        if not (train and self.settings.keeps_train_modes):
            self.model.train(train)
        self._set_train_mode_of_optimizers(train)

    def _set_train_mode_of_optimizers(self, train: bool) -> None:
        for one in optimizers_in(self.optimizer):
            if (method := mode_setter(one, train)) is not None:
                method()

    def keep_best(self) -> None:
        """Copy the weights for the next save, as this is the best epoch."""
        self._set_train_mode_of_optimizers(train=False)
        carried = b"" if self.carried is None or self.carried.model_has_none() else self.carried.dump()[0]
        metrics = metrics_of(self.reports)
        now = Weights(self.trial.number, self.epoch, self.step, own_state(self.model), self.average, carried, metrics)
        now = replace(now, base=self.base, config=self.trial.config)
        self.best.keep(now, self.model)
        self._set_train_mode_of_optimizers(train=True)

    def save(self, writer: CheckpointWriter, outside: str = "") -> str:
        """Submit a checkpoint if the trial has trained since the last one; return a note for the user, mostly "".

        Optimizers are saved in evaluation mode.

        Args:
            outside: What the trial changes outside of its model and optimizer; "" for nothing.
        """
        if self.saved == (self.epoch, self.step):
            return ""
        self._set_train_mode_of_optimizers(train=False)
        content, lost = (b"", []) if self.carried is None else self.carried.dump()
        if outside:
            lost.append(Lost(outside, "which is not the model's or the optimizer's"))
        note = ""
        if lost and not self.lossy:
            note = (
                f"trial {self.trial.number} cannot be resumed, and begins anew in another process: its checkpoint "
                f"lacks {list_names([str(each) for each in lost])}; make it in the task's `model` or `optimizer` and "
                "leave it as it is there, give it a `__getstate__` that leaves out what cannot be pickled, or keep "
                "what changes in buffers"
            )
            _log.warning("%s", note)
        self.lossy = self.lossy or bool(lost)
        state = Checkpoint(
            self.trial.number,
            self.epoch,
            self.step,
            own_state(self.model),
            _state(self.optimizer),
            _state(self.scheduler),
            tuple(self.reports),
            self.average,
            _state(self.loss_scale),
            content,
            ", ".join(each.path for each in lost),
            self.gradients.read(),
            self.carried is not None and not self.carried.model_has_none(),
            self.best.epoch,
            self.best.weights,
            self.best.kept,
            self.base,
            self.trial.config,
        )
        writer.submit(state)
        self._set_train_mode_of_optimizers(train=True)
        self.saved = (self.epoch, self.step)
        self.best.mark_saved()
        return note

    def _check_restorable(self) -> None:
        for optimizer in optimizers_in(self.optimizer):
            if isinstance(optimizer, Optimizer):  # else schedulers warn that they step before the optimizer
                optimizer._opt_called = True  # type: ignore[attr-defined]
            if not hasattr(optimizer, "load_state_dict"):
                raise TaskError(
                    f"trial {self.trial.number} cannot continue from its checkpoint: the task's `optimizer` returns "
                    f"{type(optimizer).__name__}, which has no `load_state_dict`"
                )

    def restore(self, directory: Path, steps_of: Callable[[int], int]) -> None:
        """Restore the newest checkpoint, if there is one.

        From a checkpoint of another trial, which must be there, weights and optimizer state are restored. Settings stay
        those of this trial, and its LR scheduler takes as many steps as it would have taken until this epoch.

        Args:
            steps_of: Training steps of an epoch of this trial, by its index.
        """
        state = load_newest(directory, self.trial.number, self.member.checkpoint)
        if state is None:
            if (origin := self.trial.origin) is not None:
                raise CheckpointError(
                    f"trial {self.trial.number} continues from trial {origin.trial} at epoch {origin.epoch}, and "
                    f"{checkpoint_directory(directory, self.trial.number)} has no intact checkpoint; on a network file "
                    "system it may not be visible yet, and the job is tried again"
                )
            return
        own = state.trial == self.trial.number
        if state.lost:
            begins = "begins anew" if own else "continues without that"
            _log.warning("trial %d %s: its checkpoint lacks %s", self.trial.number, begins, state.lost)
            if own:
                return
        self._check_restorable()
        self._set_train_mode_of_optimizers(train=False)  # in which checkpoints are saved
        if own:
            check_base(self.base, state.weights)
        try:
            load_own_state(self.model, state.model)
        except RuntimeError as error:
            if own and not _same_shapes(own_state(self.model), state.model):
                raise UnusableTaskError(mismatch_message("model", state, error)) from error
            raise
        if state.optimizer is None:
            _log.warning("trial %d continues from weights without an optimizer's state", self.trial.number)
        elif own:
            try:
                _load_state(self.optimizer, state.optimizer)
            except ValueError as error:  # parameter groups differ
                raise UnusableTaskError(mismatch_message("optimizer", state, error)) from error
            if state.scheduler is not None:
                _load_state(self.scheduler, state.scheduler)
        else:
            _load_state(self.optimizer, _with_param_groups(state.optimizer, _state(self.optimizer)))
        if not own:
            for report in state.reports:
                self._replay_steps(steps_of(report.epoch - 1))
                self._end_epoch_of_schedulers(report.metrics)
            self._replay_steps(state.step)
        if self.carried is not None:
            try:
                self.carried.restore(state.carried, settings=own)
            except CheckpointError as error:
                raise UnusableTaskError(mismatch_message("model", state, error)) from error
        self.gradients.set(state.gradients)
        if self.settings.ema_decay is not None:  # else the averages are of another trial or an older task
            self.average = {name: average.to(self.device) for name, average in state.average.items()}
        if self.loss_scale is not None and state.scaler is not None:
            self.loss_scale.load_state_dict(state.scaler)
        self._set_train_mode_of_optimizers(train=True)
        self.epoch, self.step, self.reports = state.epoch, state.step, list(state.reports)
        self.saved = self.proven = (state.epoch, state.step)
        for report in self.reports:
            self.best.note(report, self.trial.start)
        self.best.mark_saved()


def build(task: Task, member: Member, device: torch.device) -> TrialRuntime:
    """Build a trial at its start: seed all generators with its seed, and call the task's methods."""
    check_interval(task)
    config = member.trial.config
    settings = StepSettings.of(task, config).on(device)
    seed_all(member.trial.seed, device)
    model = move(check_model(bases_of(task, device).model(copy.deepcopy(dict(config)))), device)
    optimizer = check_optimizer(task, call(task, "optimizer", model, config=config))
    call(task, "_check_trained", model, optimizer, config=config)
    scheduler = call(task, "scheduler", optimizer, config=config)
    by_step = task.scheduler_interval == "step"
    for one in pytree.tree_leaves(scheduler):
        _check_scheduler(one)
        if by_step and isinstance(one, ReduceLROnPlateau):
            raise TaskError(
                "the task's `scheduler` returns ReduceLROnPlateau, which follows the validation loss of whole epochs, "
                'and scheduler_interval is "step"; set it to "epoch", or return another scheduler'
            )
    scale = None
    if settings.scales_loss:
        _check_not_float16(model)
        scale = LossScale()
    gradients = KeptGradients(
        model, type(task).step is not Task.step or uncleared(model, optimizers_in(optimizer), settings.max_norm) != ""
    )
    runtime = TrialRuntime(member, model, optimizer, scheduler, device, settings, gradients, by_step, loss_scale=scale)
    runtime.base = base_fingerprint(model)
    runtime.set_train_mode(train=True)
    runtime.carried = CarriedState(task, model, optimizer, scheduler, device)
    return runtime


def _check_scheduler(scheduler: Any) -> None:
    """Check that a scheduler of the task, if it is not None, steps without an argument."""
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(f"the task's `scheduler` must return a torch LR scheduler or None, got {scheduler!r}")
    argument = required_argument(scheduler)
    if argument and not isinstance(scheduler, ReduceLROnPlateau):
        raise TaskError(
            f"the task's `scheduler` returns {type(scheduler).__name__}, whose `step` requires {argument!r}, and Shoal "
            "calls step() without arguments, as for torch's LR schedulers; return one of these, or an object with "
            f"state_dict, load_state_dict and a step() that gives it {argument!r}"
        )


def _check_not_float16(model: nn.Module) -> None:
    """Check that no trained parameter is float16, in which the gradients of scaled losses overflow."""
    for path, each in model.named_parameters():
        if each.requires_grad and each.dtype == torch.float16:
            raise TaskError(
                f"the task's `model` returns a model whose {path!r} is float16, and its `precision` returns "
                '"16-mixed", which keeps weights in float32; return model.float()'
            )


def check_model(returned: Any) -> nn.Module:
    """Return a model that the task's `model` returned, which shares nothing but frozen parameters with earlier ones."""
    model: nn.Module = _checked("model", returned, nn.Module)
    changing = {
        **{path: each for path, each in model.named_parameters() if each.requires_grad},
        **{
            f"{path}.running_mean".removeprefix("."): module.running_mean
            for path, module in model.named_modules()
            if isinstance(module, _NormBase) and module.running_mean is not None
        },
    }
    for path, tensor in changing.items():
        if _returned.get(id(tensor)) is tensor:
            raise TaskError(
                f"the task's `model` returns {path!r} of a model that it returned before, so that each trial would "
                "change the others'; return a new model each time: build it in `model`, or return a copy.deepcopy"
            )
    _returned.update((id(tensor), tensor) for tensor in changing.values())
    return model


def check_optimizer(task: Task, optimizer: Any) -> Any:
    """Return the optimizer or, for a task with its own `step`, the several ones that `optimizer` returned."""
    if isinstance(optimizer, (list, tuple, dict)) and optimizer:
        if type(task).step is Task.step:
            raise TaskError("the task's `optimizer` returns several; override `step` to say what each of them does")
        for one in pytree.tree_leaves(optimizer):
            _check_optimizer(one)
        return optimizer
    checked = _check_optimizer(optimizer)
    if type(task).step is Task.step and required_argument(checked):
        raise TaskError(
            f"the task's `optimizer` returns {type(checked).__name__}, which needs a closure to step; override `step` "
            "to give it one: optimizer.step(closure), with a closure that calls zero_grad, `loss` and backward"
        )
    return checked


def _check_optimizer(value: Any) -> Any:
    """Check that a value is an optimizer, or an object that wraps one and has the methods that a plain loop calls."""
    if all(hasattr(value, name) for name in ("step", "zero_grad", "param_groups", "state_dict")):
        return value
    return _checked("optimizer", value, Optimizer)


def optimizers_in(optimizer: Any) -> list[Optimizer]:
    """Return all optimizers of a trial, in the order of their nesting."""
    return pytree.tree_leaves(optimizer)


def state_tensors(optimizer: Any) -> list[Tensor]:
    """Return the tensors in the state of a trial's optimizers; a wrapper of an optimizer may have no `state`."""
    states = [dict(getattr(one, "state", {})) for one in optimizers_in(optimizer)]
    return [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]


def parameter_warning(model: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    """Return a warning about optimized parameters that the model lacks, and unfrozen ones not optimized, or ""."""
    trained = {id(each): each for one in optimizers for group in one.param_groups for each in group["params"]}
    own = dict(model.named_parameters())
    known = set(map(id, own.values()))
    foreign = [f"one of shape {tuple(each.shape)}" for key, each in trained.items() if key not in known]
    left_out = [repr(name) for name, each in own.items() if each.requires_grad and id(each) not in trained]
    said = []
    if foreign:
        said.append(
            f"the task's `optimizer` trains parameters that are not the model's ({list_names(foreign)}), which no "
            "checkpoint holds; make them parameters of the model"
        )
    if left_out:
        said.append(
            f"the task's `optimizer` leaves out parameters of the model ({list_names(left_out)}), which keep their "
            "initial values; give them to an optimizer, or freeze them by requires_grad_(False) if that is meant"
        )
    return "; ".join(said)


def sort_by_optimizer(runtimes: Iterable[TrialRuntime]) -> list[TrialRuntime]:
    """Sort trials by their class of optimizer, so that one call updates the parameters of neighbours."""
    return sorted(runtimes, key=lambda runtime: [str(type(one)) for one in optimizers_in(runtime.optimizer)])


@contextmanager
def train_modes_kept(runtimes: Iterable[TrialRuntime]) -> Iterator[None]:
    """Context manager after which the modules of models that keep their modes have those from before."""
    models = [runtime.model for runtime in runtimes if runtime.settings.keeps_train_modes]
    modes = [(each, each.training) for model in models for each in model.modules()]
    yield
    for module, mode in modes:
        module.training = mode


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock includes this work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checked(method: str, value: Any, kind: type) -> Any:
    """Check the type of a value that a method of the task returned, and return the value."""
    if not isinstance(value, kind):
        raise TaskError(f"the task's `{method}` must return {kind.__module__}.{kind.__name__}, got {value!r}")
    return value


def check_scalar(name: str, value: Any, axes: int = 0) -> None:
    """Check that a loss or metric is a real scalar."""
    if not isinstance(value, Tensor) or value.dim() != axes or value.is_complex():
        got = f"{value.dtype} of shape {tuple(value.shape[axes:])}" if isinstance(value, Tensor) else _describe(value)
        raise TaskError(f"the task's {name!r} must be a real scalar tensor, got {got}; take its mean over the batch")


def _describe(value: Any) -> str:
    """Return the type of a value, with its values where they are short; those of a batch are not."""
    return f"{value!r}" if value is None or isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def _state(owner: Any) -> Any:
    """Return the state dict of an optimizer or scheduler, a list with one for each of several, or None."""
    if isinstance(owner, (list, tuple, dict)):
        return [_state(one) for one in pytree.tree_leaves(owner)]
    return None if owner is None else owner.state_dict()


def _same_shapes(model: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    return model.keys() == saved.keys() and all(
        getattr(value, "shape", None) == getattr(saved[name], "shape", None) for name, value in model.items()
    )


def _with_param_groups(state: Any, own: Any) -> Any:
    """Return the state dict of an optimizer, or a list of several, with the parameter groups of `own`."""
    if isinstance(state, list):
        return [_with_param_groups(one, mine) for one, mine in zip(state, own, strict=True)]
    return {**state, "param_groups": own["param_groups"]}


def _load_state(owner: Any, state: Any) -> None:
    if isinstance(owner, (list, tuple, dict)):
        for one, own in zip(pytree.tree_leaves(owner), state, strict=True):
            _load_state(one, own)
    elif owner is not None:
        owner.load_state_dict(state)
