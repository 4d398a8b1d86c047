"""A trial in a worker: its model, optimizer, LR scheduler and progress, and checks of what the task returns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from shoal.fuse.generators import seed_all
from shoal.fuse.loss_scale import LossScale
from shoal.pickling import original_or_loaded, why_not_loaded
from shoal.task import Task, call, check_interval
from shoal.worker.checkpoint import Checkpoint, load_newest, save, unfit
from shoal.worker.failures import user_traceback
from shoal.worker.step_settings import StepSettings

__all__ = [
    "TrialRuntime",
    "build",
    "check_optimizer",
    "check_scalar",
    "new_model",
    "optimizers_in",
    "ownership",
    "side_by_side",
    "trained_model",
    "wait",
]

_SHOWN = 5
"""Number of parameters that a message names."""

_returned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Id -> tensor that training changes, of all live models that tasks have returned in this process."""


@dataclass(eq=False)
class TrialRuntime:
    """A trial in training.

    Args:
        member: Trial, and the epoch at which it stops.
        model: Model of the task.
        optimizer: Optimizer of the task; several in a list, tuple or dict, if the task has its own `step`.
        scheduler: LR scheduler of the task, several as for the optimizer, or None.
        device: Device of the model.
        settings: Settings of its training steps.
        by_step: Whether schedulers step after each training step, not after each epoch.
        epoch: Epochs finished.
        step: Steps done of the next epoch.
        reports: Reports of all epochs so far.
        failure: Reason why the trial fails at the end of its epoch; "" if it does not.
        saved: Epoch and step of the newest checkpoint.
        average: Moving averages of the trained parameters by name; empty before the first step, or if there are none.
        loss_scale: Loss scale, or None if the precision needs none.
    """

    member: Member
    model: nn.Module
    optimizer: Any
    scheduler: Any
    device: torch.device
    settings: StepSettings
    by_step: bool = False
    epoch: int = 0
    step: int = 0
    reports: list[Report] = field(default_factory=list)
    failure: str = ""
    saved: tuple[int, int] = (0, 0)
    average: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: LossScale | None = None

    @property
    def trial(self) -> Trial:
        """The trial in training."""
        return self.member.trial

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes a context in which the model runs in the precision of the trial."""
        return partial(self.settings.autocast, self.device)

    def end_step(self) -> None:
        """Count a training step; step the LR scheduler if it steps after each."""
        self.step += 1
        if self.by_step:
            self._step_schedulers({})

    def end_epoch(self, metrics: dict[str, float], seconds: float) -> Report:
        """Count an epoch and add its report; step the LR scheduler if it steps after each epoch."""
        self.epoch, self.step, self.failure = self.epoch + 1, 0, ""
        self._end_epoch_of_schedulers(metrics)
        self.reports.append(Report(self.trial.number, self.epoch, metrics, seconds))
        return self.reports[-1]

    def _replay_steps(self, steps: int) -> None:
        if self.by_step:
            for _ in range(steps):
                self._step_schedulers({})

    def _end_epoch_of_schedulers(self, metrics: Mapping[str, float]) -> None:
        """Step schedulers per epoch; one that steps after each step may have an `end_epoch(metrics)` besides."""
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

    def save(self, directory: Path) -> None:
        """Write a checkpoint, if the trial has trained since the last one."""
        if self.saved == (self.epoch, self.step):
            return
        state = Checkpoint(
            self.trial.number,
            self.epoch,
            self.step,
            self.model.state_dict(),
            _state(self.optimizer),
            _state(self.scheduler),
            tuple(self.reports),
            self.average,
            _state(self.loss_scale),
        )
        save(directory, state)
        self.saved = (self.epoch, self.step)

    def restore(self, directory: Path, epoch_steps: int) -> None:
        """Go on from the newest checkpoint, if there is one.

        A checkpoint of another trial gives weights and optimizer state. Settings stay those of this trial, and its LR
        scheduler takes the steps that it would have taken by now.

        Args:
            directory: Directory of the study.
            epoch_steps: Training steps of this trial in an epoch.

        Raises:
            UnusableTaskError: The model or the optimizer does not fit the trial's own checkpoint.
        """
        state = load_newest(directory, self.trial.number)
        if state is None:
            return
        for optimizer in optimizers_in(self.optimizer):  # else schedulers warn that they step before the optimizer
            optimizer._opt_called = True  # type: ignore[attr-defined]
        own = state.trial == self.trial.number
        try:
            self.model.load_state_dict(state.model)
        except RuntimeError as error:
            if own and not _fits(self.model.state_dict(), state.model):
                raise UnusableTaskError(unfit("model", state, error)) from error
            raise
        if own:
            try:
                _load_state(self.optimizer, state.optimizer)
            except ValueError as error:  # parameter groups differ
                raise UnusableTaskError(unfit("optimizer", state, error)) from error
            if state.scheduler is not None:
                _load_state(self.scheduler, state.scheduler)
        else:
            _load_state(self.optimizer, _with_settings(state.optimizer, _state(self.optimizer)))
            for report in state.reports:
                self._replay_steps(epoch_steps)
                self._end_epoch_of_schedulers(report.metrics)
            self._replay_steps(state.step)
        if self.settings.decay is not None:  # else another trial's, or those of an earlier version of the task
            self.average = {name: average.to(self.device) for name, average in state.average.items()}
        if self.loss_scale is not None and state.scaler is not None:
            self.loss_scale.load_state_dict(state.scaler)
        self.epoch, self.step, self.reports = state.epoch, state.step, list(state.reports)
        self.saved = (state.epoch, state.step)


def build(task: Task, member: Member, device: torch.device) -> TrialRuntime:
    """Build a trial at its start: seed all generators with its seed, then call the task's methods.

    Raises:
        TaskError: A method of the task returns a wrong value.
    """
    check_interval(task)
    config = member.trial.config
    settings = StepSettings.of(task, config)
    seed_all(member.trial.seed, device)
    model = new_model(call(task, "model", config=config)).to(device).train()
    optimizer = check_optimizer(task, call(task, "optimizer", model, config=config))
    scheduler = call(task, "scheduler", optimizer, config=config)
    by_step = task.scheduler_interval == "step"
    for one in pytree.tree_leaves(scheduler):
        if one is not None and not callable(getattr(one, "step", None)):
            raise TaskError(f"the task's `scheduler` must return a torch LR scheduler or None, got {one!r}")
        if by_step and isinstance(one, ReduceLROnPlateau):
            raise TaskError(
                "the task's `scheduler` returns ReduceLROnPlateau, which follows the validation loss of whole epochs, "
                'and scheduler_interval is "step"; set it to "epoch", or return another scheduler'
            )
    scale = None
    if settings.scales_loss:
        _check_wide(model)
        scale = LossScale()
    return TrialRuntime(member, model, optimizer, scheduler, device, settings, by_step, loss_scale=scale)


def _check_wide(model: nn.Module) -> None:
    """Check that no parameter in training is float16, in which the gradients of scaled losses overflow.

    Raises:
        TaskError: One is.
    """
    for path, each in model.named_parameters():
        if each.requires_grad and each.dtype == torch.float16:
            raise TaskError(
                f"the task's `model` returns a model whose {path!r} is float16, and its `precision` returns "
                '"16-mixed", which keeps weights in float32; return model.float()'
            )


def trained_model(task: bytes, trial: Trial, directory: Path) -> nn.Module:
    """The trained model of a trial, from its newest checkpoint, on the CPU and in evaluation mode.

    Averaged parameters (`Task.ema`) take the place of the trained ones.

    Args:
        task: Task of the study, pickled by cloudpickle.
        trial: Trial of the study.
        directory: Directory of the study.

    Raises:
        CheckpointError: The trial has no intact checkpoint.
        UnusableTaskError: The task cannot be loaded, or its model does not fit the checkpoint.
    """
    checkpoint = load_newest(directory, trial.number)
    if checkpoint is None:
        raise CheckpointError(f"trial {trial.number} has no intact checkpoint below {directory / 'checkpoints'}")
    try:
        owner: Task = original_or_loaded(task)
    except (Exception, SystemExit) as error:
        message = f"the task of the study in {directory} cannot be loaded: {why_not_loaded(error)}"
        raise UnusableTaskError(f"{message}\n\n{user_traceback(error)}") from error
    with torch.random.fork_rng(devices=[]):
        model = new_model(call(owner, "model", config=trial.config))
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise UnusableTaskError(unfit("model", checkpoint, error)) from error
    with torch.no_grad():
        for name, average in checkpoint.average.items():  # of a tied parameter, only one of its names
            model.get_parameter(name).copy_(average)
    return model.eval()


def new_model(returned: Any) -> nn.Module:
    """Check the model that the task's `model` returned, and return it.

    Trials may share frozen parameters, as of a backbone that the task holds.

    Raises:
        TaskError: The value is no module, or shares trainable parameters or running statistics with a module that was
            returned before.
    """
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
    """Check the optimizer, or several, that the task's `optimizer` returned, and return the value.

    Raises:
        TaskError: The value is no optimizer, or there are several and the task does not override `step`.
    """
    if isinstance(optimizer, (list, tuple, dict)) and optimizer:
        if type(task).step is Task.step:
            raise TaskError("the task's `optimizer` returns several; override `step` to say what each of them does")
        for one in pytree.tree_leaves(optimizer):
            _checked("optimizer", one, Optimizer)
        return optimizer
    return _checked("optimizer", optimizer, Optimizer)


def optimizers_in(optimizer: Any) -> list[Optimizer]:
    """All optimizers of a trial, in the order of their nesting."""
    return pytree.tree_leaves(optimizer)


def ownership(model: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    """A note on parameters that optimizers train but the model lacks, or that the model has unfrozen and no optimizer
    trains; "" if there are none.
    """
    trained = {id(each): each for one in optimizers for group in one.param_groups for each in group["params"]}
    own = dict(model.named_parameters())
    known = set(map(id, own.values()))
    foreign = [f"one of shape {tuple(each.shape)}" for key, each in trained.items() if key not in known]
    left_out = [repr(name) for name, each in own.items() if each.requires_grad and id(each) not in trained]
    said = []
    if foreign:
        said.append(
            f"the task's `optimizer` trains parameters that are not the model's ({_some(foreign)}), which no "
            "checkpoint holds; make them parameters of the model"
        )
    if left_out:
        said.append(
            f"the task's `optimizer` leaves out parameters of the model ({_some(left_out)}), which keep their initial "
            "values; give them to an optimizer, or freeze them by requires_grad_(False) if that is meant"
        )
    return "; ".join(said)


def _some(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])


def side_by_side(runtimes: Iterable[TrialRuntime]) -> list[TrialRuntime]:
    """Trials in the order of their array: those with one class of optimizer side by side, so that one call updates
    their parameters.
    """
    return sorted(runtimes, key=lambda runtime: [str(type(one)) for one in optimizers_in(runtime.optimizer)])


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checked(method: str, value: Any, kind: type) -> Any:
    """Check the type of a value that a method of the task returned, and return the value.

    Raises:
        TaskError: The value is of another type.
    """
    if not isinstance(value, kind):
        raise TaskError(f"the task's `{method}` must return {kind.__module__}.{kind.__name__}, got {value!r}")
    return value


def check_scalar(name: str, value: Any, axes: int = 0) -> None:
    """Check that a loss or metric is a real scalar.

    Args:
        name: Name of the loss or metric.
        value: Value that the task returned.
        axes: Number of leading axes that count members.

    Raises:
        TaskError: The value is no tensor, has further axes, or is complex.
    """
    if not isinstance(value, Tensor) or value.dim() != axes or value.is_complex():
        got = f"{value.dtype} of shape {tuple(value.shape[axes:])}" if isinstance(value, Tensor) else repr(value)
        raise TaskError(f"the task's {name!r} must be a real scalar tensor, got {got}; take its mean over the batch")


def _state(owner: Any) -> Any:
    """The state dict of an optimizer or scheduler, a list with one for each of several, or None."""
    if isinstance(owner, (list, tuple, dict)):
        return [_state(one) for one in pytree.tree_leaves(owner)]
    return None if owner is None else owner.state_dict()


def _fits(model: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether two state dicts have equal names and shapes."""
    return model.keys() == saved.keys() and all(
        getattr(value, "shape", None) == getattr(saved[name], "shape", None) for name, value in model.items()
    )


def _with_settings(state: Any, own: Any) -> Any:
    """The state dict of an optimizer, or a list of several, with the settings of `own`."""
    if isinstance(state, list):
        return [_with_settings(one, mine) for one, mine in zip(state, own, strict=True)]
    return {**state, "param_groups": own["param_groups"]}


def _load_state(owner: Any, state: Any) -> None:
    if isinstance(owner, (list, tuple, dict)):
        for one, own in zip(pytree.tree_leaves(owner), state, strict=True):
            _load_state(one, own)
    elif owner is not None:
        owner.load_state_dict(state)
