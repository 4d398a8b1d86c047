"""What a user writes: one class, plain PyTorch inside."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from inspect import Parameter
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from shoal.core.errors import TaskError
from shoal.core.trial import Config

__all__ = ["Task", "call", "check_interval", "takes_config"]

_running: ContextVar["tuple[Task, str] | None"] = ContextVar("shoal_running", default=None)
"""The task that may not be written to now, and the method of it that runs."""


class Task(ABC):
    """A training that a study searches the configuration of.

    Every method may read any part of the config. Trials whose `data` read equal values share one copy of the data, and
    trials whose models have one structure are trained as one; nothing needs to be marked.

    What becomes of it, alone or fused: torch is seeded with the trial's seed and `model` and `optimizer` are called.
    The model is set to training, and to evaluation for validation alone. At each epoch the training set is shuffled by
    the data seed and the epoch's number, cut into batches (the last may be smaller), and each is a training step on
    `loss`. Then `metrics` and `loss` are averaged over the validation set, weighted by batch size, `scheduler` steps
    once (`ReduceLROnPlateau` with the validation loss; see `scheduler_interval`), and the averages are reported, the
    loss as `valid_loss`. Where the config has no "batch_size" and `batch_size` is not overridden, a batch has 32
    samples. `help(shoal.reproduce)` says how a loop of your own draws the same random numbers.

    Every process that needs the data calls `data`, with all random generators seeded alike. Batches are what
    `torch.utils.data.default_collate` makes of samples, on the trial's device. A sample is to depend on its index, and
    on what its data set draws from the generators of torch, Python and NumPy (not from one of its own): where it draws
    nothing it is not asked for again as long as it can be kept. The task is pickled (by cloudpickle): keep data sets
    out of its attributes and load them in `data`.

    One object serves many trials. While they are built (`model`, `optimizer`, `scheduler`) or trained (`step`, `loss`,
    `metrics`, `batch_size`), setting or deleting an attribute of the task is a `TaskError`: all trials would share it,
    and each would train with what the last one has put there. Keep what belongs to a trial on its model. `__init__` and
    `data` may set attributes (unless one of those methods calls them). A `functools.cached_property` may be used in a
    class of a module that workers import; before Python 3.12 it holds a lock, so the class of a script or a notebook
    cannot be pickled with it. Not seen, and as wrong, are changes to a list or dict that an attribute holds, and writes
    to the class (`type(self).x = ...`). In the process that calls `tune` (`backend="inline"`, `Study.best_model`) that
    object is the one given, which stays in memory as long as the process; if it has changed since (an attribute; a
    class, function or global of a script or a notebook), a copy of what it was, and neither ever changes the other.

    The config that a method is given is its own copy: changing it changes nothing for anybody else.
    """

    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """When schedulers step: once an epoch, after validation, or after each training step (a warm-up, one cycle).

    With "step", a training step is one call of `step`. `ReduceLROnPlateau` needs "epoch": it follows `valid_loss`.
    """

    shared_augmentation: bool = False
    """Whether what is drawn for a sample depends on the data seed, the epoch and the sample alone.

    It matters where samples draw random numbers (crops, flips, noise). By default these belong to the batch that the
    sample is in, so only trials of one batch size can share what was made of a sample. With True the generators are
    seeded for each sample by itself: trials of all batch sizes see the same augmented sample in the same epoch, and
    when they train in one process it is prepared once. Either way a trial sees the same samples alone as in company.
    """

    @abstractmethod
    def data(self, config: Config) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training and the validation set, with a length and indices (map style)."""

    @abstractmethod
    def model(self, config: Config) -> nn.Module:
        """A new model with its initial weights, at each call: what trains, and running statistics, are its own.

        Frozen parameters may be those of a module that the task holds.
        """

    @abstractmethod
    def optimizer(self, model: nn.Module, config: Config) -> Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]:
        """A new optimizer of the model's parameters; several for a `step` of your own.

        The study notes once, in its progress and in `shoal status`, where they leave out parameters that are not
        frozen, or train others than the model's.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a batch, a scalar."""

    def scheduler(self, optimizer: Any, config: Config) -> Any | None:
        """A torch LR scheduler of what `optimizer` returned, or None; several for several.

        It steps once an epoch, or after each training step: see `scheduler_interval`.
        """
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Scalars by name, each a mean over a validation batch.

        Called without gradients, the model evaluating. A forward pass that `loss` made on the same tensors is not
        computed again. What is reported of a name is its mean over the samples of the batches that have it, weighted by
        batch size: a batch that leaves a name out (a class that does not occur in it) does not count for that name.
        """
        return {}

    def batch_size(self, config: Config) -> int:
        """Samples per step: the config's "batch_size", or 32 where it has none."""
        size: int = config.get("batch_size", 32)
        return size

    def step(self, model: nn.Module, batch: Any, optimizer: Any, *config: Any, **_: Any) -> Tensor:
        """One training step; returns the loss.

        To be overridden for several optimizers (a GAN), several losses, gradient clipping: whatever a training loop may
        do, as `step(self, model, batch, optimizer)` or, where it needs the config of its trial, as
        `step(self, model, batch, optimizer, config)`; type checkers take both. Other arguments are refused by `tune`.

        Trials are still trained at once: `model` and `optimizer` then stand for all of them. So does `config`: what is
        equal in all trials is that value, and a float in which they differ stands for all of theirs in arithmetic and
        in torch's functions. Where the step asks for what each trial has of its own, trials train in plain PyTorch:
        a number of a tensor, a closure (LBFGS), a value of the config in which they differ that is no float (an
        integer, a truth value, a string, a list), or such a float as a plain one (`if`, `float()`, `math.exp`).

        Args:
            model: set to training.
            batch: as for `loss`.
            optimizer: what `optimizer` returned.
            config: of the trial; not looked at here.
        """
        optimizer.zero_grad()
        loss: Tensor = call(self, "loss", model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_unshared(name, "sets")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._check_unshared(name, "deletes")
        super().__delattr__(name)

    def _check_unshared(self, name: str, does: str) -> None:
        running = _running.get()
        if running is not None and running[0] is self:
            raise TaskError(
                f"the task's `{running[1]}` {does} its attribute {name!r}, which all trials share; keep what belongs "
                "to one trial on its model, and set what serves all of them in `__init__` or in `data`; for a schedule "
                'of training steps return the scheduler from `scheduler`, with scheduler_interval = "step" in the class'
            )


def call(task: Task, method: str, *args: Any, config: Config | None = None) -> Any:
    """What a method of a task returns for one trial; the task cannot be written to meanwhile.

    Args:
        task: the user's.
        method: its name.
        args: of the method.
        config: the last argument, of which it gets a copy of its own; None: it takes no config.

    Raises:
        TaskError: it sets or deletes an attribute of the task.
        Exception: whatever else it raises.
    """
    own = () if config is None else (copy.deepcopy(dict(config)),)
    before = _running.set((task, method))
    try:
        return getattr(task, method)(*args, *own)
    finally:
        _running.reset(before)


def check_interval(task: Task) -> None:
    """Refuse a task whose schedulers step at no known time.

    Raises:
        TaskError: names the value.
    """
    if task.scheduler_interval not in ("epoch", "step"):
        raise TaskError(f'`scheduler_interval` of a task must be "epoch" or "step", got {task.scheduler_interval!r}')


def takes_config(task: Task) -> bool:
    """Whether the task's `step` is to be given the config: it has one argument after the optimizer, or any number.

    Raises:
        TaskError: that cannot be said for sure, or it takes no optimizer; shows what it takes.
    """
    signature = inspect.signature(task.step)
    parameters = list(signature.parameters.values())
    kinds = {each.kind for each in parameters}
    named = [x for x in parameters if x.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    fourth_fits = all(each.default is Parameter.empty or each.name == "config" for each in named[3:])
    if Parameter.KEYWORD_ONLY not in kinds and len(named) <= 4 and fourth_fits:
        if Parameter.VAR_POSITIONAL in kinds or len(named) == 4:
            return True
        if len(named) == 3 and Parameter.VAR_KEYWORD not in kinds:
            return False
    raise TaskError(
        "the task's `step` must be step(self, model, batch, optimizer), or step(self, model, batch, optimizer, config) "
        f"to be given the config, but takes {signature}; make settings of your own attributes of the task"
    )
