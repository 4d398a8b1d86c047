"""Task, the base class of a user's training, and calls of its methods."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from inspect import Parameter
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from shoal.algorithms.rules import StopRule
from shoal.core.errors import TaskError
from shoal.core.names import explain_missing_name
from shoal.core.objective import Objective
from shoal.core.trial import Config

__all__ = ["Task", "call", "check_interval", "size_of", "takes_config"]

_running: ContextVar["tuple[Task, str] | None"] = ContextVar("shoal_running", default=None)
"""The task that must not be written to now, and its method that runs."""


class Task(ABC):
    """A training whose configuration a study searches.

    Every method may read any part of the config. Trials whose `data` reads equal values share one copy of the data, and
    trials whose models have one structure train as one; nothing needs to be marked.

    Training, alone or fused: torch is seeded with the trial's seed, and `model` and `optimizer` are called. The model
    is in training mode, and in evaluation mode for validation. At each epoch the training set is shuffled by the data
    seed and the epoch's number, and cut into batches (the last may be smaller). Each batch is a training step on
    `loss`. Then `end_epoch` is called, and `metrics` and `loss` are averaged over the validation set, weighted by batch
    size. `scheduler` steps once (`ReduceLROnPlateau` with the validation loss; see `scheduler_interval`), and the
    averages are reported, the loss as `valid_loss`. If the config has no "batch_size" and `batch_size` is not
    overridden, a batch has 32 samples.
    `help(shoal.reproduce)` says how a loop of your own draws the same random numbers.

    Every process that needs the data calls `data`, with all random generators seeded alike. Batches are made by
    `collate`, and moved to the trial's device. A sample may depend only on its index, and on draws from
    the generators of torch, Python and NumPy (not from a generator of the data set). Samples without draws are fetched
    once, as long as memory allows. The task is pickled (by cloudpickle): load data sets in `data`, and keep them out of
    its attributes.

    One object serves many trials. While they are built (`model`, `optimizer`, `scheduler`) or trained (`step`, `loss`,
    `metrics`, `end_epoch`, `batch_size`), setting or deleting an attribute of the task raises `TaskError`, since all
    trials share the attribute. Keep the state of a trial on its model, whose attributes are in its checkpoints.
    `__init__` and `data` may set attributes (unless one of those methods calls them). A `functools.cached_property`
    works in a class of a module that workers import; before Python 3.12 it holds a lock, so a class of a script or a
    notebook cannot be pickled with it. Also wrong, but not detected, are changes to a list or dict in an attribute, and
    writes to the class (`type(self).x = ...`).

    In the process that calls `tune` (`backend="inline"`, `Study.best_model`) that object is the given one, which stays
    in memory as long as the process. If it has changed since (an attribute; a class, function or global of a script or
    a notebook), it is a copy of the original state, and neither changes the other.

    Each method gets its own copy of the config, which it may change.
    """

    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """When schedulers step: once an epoch, after validation, or after each training step (a warm-up, one cycle).

    With "step", a training step is one call of `step`. `ReduceLROnPlateau` needs "epoch": it follows `valid_loss`.
    """

    exact: bool = True
    """Whether trials that train as one array must equal the same trials in plain PyTorch.

    Copies of some trials then train in plain PyTorch beside the first steps of an array, its first validation, and
    ever more rarely after that. What differs by more than rounding trains in plain PyTorch from there; `shoal status`
    and `Study.proof` say what was compared. Set it to False for a program whose runs differ in any case, since it reads
    a clock or adds atomically: its arrays are not checked.
    """

    loader_workers: int = 0
    """Number of processes that fetch the samples of a data set from `data`, beside the one that trains; each of the two
    sets has its own. A `DataLoader` has its `num_workers` in place of this. Samples are equal with and without.
    """

    micro_batch_size: int | None = None
    """Samples that are computed at once; None for a whole batch. A larger batch must be a multiple of it.

    The gradients of the micro-batches of a batch are added, weighted such that a loss that is a mean over samples is
    that of the batch. Random numbers are drawn for each micro-batch, and `BatchNorm` normalises over one. Trials on a
    `base` with different batch sizes then train as one array, like those that differ in `accumulate`. Validation
    batches have this size, too, unless `eval_batch_size` is overridden. Needs data sets from `data`, no loaders, and no
    `step` of your own.
    """

    shared_augmentation: bool = False
    """Whether random draws for a sample depend only on the data seed, the epoch and the sample.

    It matters if samples draw random numbers (crops, flips, noise). By default these depend on the batch of the sample,
    so only trials of one batch size can share augmented samples. With True the generators are seeded for each sample:
    trials of all batch sizes get the same augmented sample in the same epoch, which is prepared once if they train in
    one process. Either way a trial gets the same samples alone as with others.
    """

    @abstractmethod
    def data(self, config: Config) -> tuple[Dataset[Any] | DataLoader[Any], Dataset[Any] | DataLoader[Any]]:
        """Return the training and the validation set, or a `DataLoader` of each.

        A data set has a length and indices (map style), or it is iterable. An iterable one is read in its own order,
        one iteration after the other, each with the generators of torch, Python and NumPy seeded with the data seed and
        the number of the iteration, which its `set_epoch` gets, if it has one. With a `__len__` an epoch is an
        iteration; a training set without one needs `steps_per_epoch`. To resume within an iteration, a trial reads and
        drops the samples before. Each `iter()` of it must be independent of the others.

        Of a loader, `batch_size`, `shuffle` or `sampler`, `drop_last`, `collate_fn`, `num_workers`, `prefetch_factor`
        and `worker_init_fn` are kept. shuffle=True is the order of the data seed, as for a data set; shuffle=False the
        ascending order, also in training. Another sampler is iterated once an epoch, with the generators seeded with
        the data seed and the epoch; it must have a length. The training loader's batch size must be that of
        `batch_size`, unless neither the config nor an override gives one; validation has its loader's own. Validation
        is not shuffled. Batch samplers are refused, and so are loader processes for an iterable data set.

        Trials share one copy of a data set if `data` reads equal values: a loader that is made with the config's batch
        size has a copy for each batch size.
        """

    def base(self, config: Config) -> nn.Module | None:
        """Return a frozen model that the models of all trials are built on, such as a pretrained one; None for none.

        Called once in each process, and again for other values of what it reads of the config, with all random
        generators seeded alike. Its parameters are frozen and moved to the device; trials of different bases form no
        array. A base that no trial uses is dropped when another one is built. Checkpoints do not hold its parameters:
        `torch.load(...)["model"]` loads with strict=False.
        """
        return None

    @abstractmethod
    def model(self, config: Config, *base: Any, **_: Any) -> nn.Module:
        """Return a new model with its initial weights at each call, with its own trainable parameters and statistics.

        Frozen parameters may be those of a module that the task holds. If the task has a `base`, override it as
        `model(self, config, base)`. It is given a copy of the base whose parameters lie in the memory of the base, and
        may change its modules, as `peft.get_peft_model` does. What it unfreezes gets memory of its own; a write to the
        memory of the base raises `TaskError`.
        """

    @abstractmethod
    def optimizer(self, model: nn.Module, config: Config) -> Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]:
        """Return a new optimizer of the model's parameters, or several for a `step` of your own.

        It may wrap another one: an object with `step`, `zero_grad`, `param_groups` and `state_dict`, and to resume from
        a checkpoint with `load_state_dict`. One with the modes `train` and `eval` validates and is saved in the latter.
        If they leave out parameters that are not frozen, or train parameters that the model lacks, the study notes it
        once in its progress and in `shoal status`.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over a batch, a scalar.

        With a `step` of your own that does not call it, it is only the validation loss, reported as `valid_loss`; a GAN
        returns any scalar that says how good it is.
        """

    def scheduler(self, optimizer: Any, config: Config) -> Any | None:
        """Return a torch LR scheduler of `optimizer`, or None; several for several optimizers.

        It steps once an epoch, or after each training step: see `scheduler_interval`. One whose `step` requires an
        argument is refused, but for `ReduceLROnPlateau`, which is given the validation loss.
        """
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return scalars by name, each a mean over a validation batch.

        Called without gradients, with the model in evaluation mode. Where `loss` and `metrics` call the model once
        each, alike, and a first batch has shown that both calls return the same, the second is not computed again. The
        reported value of a name is the mean over the batches that have it, weighted by batch size: a batch that leaves
        a name out (a class that does not occur in it) does not count for it.
        """
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Return the batch of some samples: tensors whose first axis counts samples, nested as `loss` takes them.

        Override it as the `collate_fn` of a `DataLoader`, for example to pad sequences to the longest of the batch. It
        may draw random numbers (masked words): the generators of torch, Python and NumPy are seeded for each batch, so
        trials of one batch size get the same batches, alone and with others. Trials at different epochs train at once
        only if their batches have one shape: pad to a multiple of some length.
        """
        return default_collate(samples)

    def batch_size(self, config: Config) -> int:
        """Return the samples per step: the config's "batch_size", or 32 if it has none."""
        size: int = config.get("batch_size", 32)
        return size

    def eval_batch_size(self, config: Config) -> int:
        """Return the samples of a validation batch: by default `batch_size`, or `micro_batch_size` if that is less."""
        return self.batch_size(config)

    def accumulate(self, config: Config) -> int:
        """Return the batches of a training step, whose gradients are added before the optimizer steps: by default 1.

        The gradient is that of the mean loss over all samples of the step. The last step of a pass over the training
        set may have fewer batches. Trials on a `base` that differ in it may be one array, unless `steps_per_epoch` is
        overridden.
        Steps, and schedulers with `scheduler_interval` "step", count optimizer steps.
        """
        return 1

    def clip_norm(self, config: Config) -> float | None:
        """Return the norm to which the gradients of all parameters together are clipped, or None.

        As `torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)` between backward pass and optimizer step.
        """
        return None

    def precision(self, config: Config) -> str:
        """Return "32", or "bf16-mixed" or "16-mixed" to run `loss` and `metrics` under `torch.autocast`.

        "auto" is "bf16-mixed" on GPUs with units for bfloat16 (NVIDIA's since Ampere), "32" elsewhere.

        "16-mixed" computes in float16, and each trial has a loss scale of its own, as `torch.amp.GradScaler` with its
        defaults keeps one. A step whose gradients overflow is left out; schedulers and averages count it.
        """
        return "32"

    def ema(self, config: Config) -> float | None:
        """Return the decay of an exponential moving average of the trained parameters, such as 0.999, or None.

        After each training step, average = decay * average + (1 - decay) * parameter. Validation and
        `Study.best_model` use the averages, training does not. Buffers are not averaged.
        """
        return None

    def steps_per_epoch(self, config: Config) -> int | float | None:
        """Return the training steps of an epoch, or a share of a pass below 1; None for one pass over the training set.

        An epoch ends with a validation and a report, and budgets count epochs. So with 100, `Hyperband(max_epochs=27)`
        validates every 100 steps and trains at most 2,700 steps. Passes over the training set continue across epochs.

        A share counts samples: with 0.05, epoch k ends with the step that completes k twentieths of the samples of a
        pass, whatever the batch size, and 20 epochs are one pass. A share of less than a step is refused.
        """
        return None

    def end_epoch(self, model: nn.Module, config: Config) -> None:  # noqa: B027  (to override it is optional)
        """Do what a loop does between the training steps of an epoch and its validation; by default nothing.

        Statistics of the weights, an average of models, a schedule of your own. Called for each trial with its own
        model, a plain module in training mode, alone and fused. Tensors are best changed in place (under
        `torch.no_grad()`). After a change of other attributes an array is made anew, at each epoch. The generators of
        torch, Python and NumPy are seeded by the trial and the epoch. Not called in an epoch with a loss that is not
        finite, as the trial has failed.
        """

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Return what `evaluate` needs of a validation batch: tensors, nested in any way; by default None.

        Called after `metrics` in the same way.
        """
        return None

    def evaluate(self, outputs: list[Any], config: Config) -> Mapping[str, float]:
        """Return metrics of the whole validation set (F1, AUC), which are not means over batches.

        Called if `outputs` returns anything, after the last validation batch, for each trial by itself. The generators
        of torch, Python and NumPy are then seeded by the trial, the same at each epoch. Not called in an epoch with a
        loss that is not finite, as the trial has failed.

        Args:
            outputs: What `outputs` returned for each validation batch, on the CPU.
            config: Config of the trial.
        """
        return {}

    def _weigh(self, batches: Sequence[Any], accumulate: int, micro_batches: int = 1) -> Sequence[tuple[Any, float]]:
        """The batches of a training step, each with the factor of its loss: its share of the step's samples.

        Args:
            accumulate: Batches of a step, of which the last one of a pass may have fewer.
            micro_batches: Consecutive ones that are parts of one batch of the task.
        """
        sizes = [size_of(batch) for batch in batches]
        return [(batch, size / sum(sizes)) for batch, size in zip(batches, sizes, strict=True)]

    _keeps_train_modes: bool = False
    """Whether training leaves the modes of modules as the model has them, and keeps those after a validation."""

    def _study_warnings(self, objectives: Sequence[Objective], longest: int | None, config: Config) -> list[str]:
        """Return the settings of the task that do not fit a new study, in words; `tune` logs each as a warning.

        Called before the task is pickled, so it may keep what the study asks for.
        """
        return []

    def _stop_rules(self, objectives: Sequence[Objective]) -> list[StopRule]:
        """Return the rules of the task itself that end trials of a new study."""
        return []

    def _best_epoch(self) -> tuple[str, Objective] | None:
        """Return the rule by which the task itself keeps a best epoch, in words and as an objective; None for none."""
        return None

    def _check_trained(self, model: nn.Module, optimizer: Any, config: Config) -> None:  # noqa: B027
        """Refuse an optimizer that does not fit the model; called when both are made for a trial."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any, *config: Any, **_: Any) -> Tensor:
        """Take one training step; returns the loss.

        Override it for several optimizers (a GAN), several losses, or any other training loop, as
        `step(self, model, batch, optimizer)` or, if it needs the config of its trial, as
        `step(self, model, batch, optimizer, config)`; type checkers accept both. `tune` refuses other arguments.

        Trials still train at once: `model`, `optimizer` and `config` then stand for all of them. A value of the config
        that is equal in all trials is unchanged. A float that differs stands for the values of all trials in arithmetic
        and in torch's functions. Trials train in plain PyTorch if the step needs a value of each trial: a number of a
        tensor, a closure (LBFGS), a differing value of the config that is not a float (an integer, a boolean, a string,
        a list), or a differing float as a plain one (`if`, `float()`, `math.exp`).

        Args:
            model: Model in training mode.
            batch: Batch as for `loss`.
            optimizer: Result of `optimizer`.
            config: Config of the trial; not used here.
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


def size_of(batch: Any) -> int:
    """Number of samples in a batch: the length of its first tensor."""
    if type(batch) in (list, tuple) and batch and type(batch[0]) is Tensor and batch[0].dim() > 0:  # the common case
        return batch[0].shape[0]
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise TaskError(f"a batch must hold a tensor whose first axis counts samples, got {type(batch).__name__}")


def call(task: Task, method: str, *args: Any, config: Config | None = None) -> Any:
    """Call a method of a task for one trial, with a copy of its config, if any, as the last argument.

    The task cannot be written to meanwhile.
    """
    own = () if config is None else (copy.deepcopy(dict(config)),)
    bound = getattr(task, method)
    if not callable(bound):
        raise TaskError(
            f"the task's attribute `{method}` is {bound!r}, and must be a method with the arguments of `Task.{method}`"
        )
    before = _running.set((task, method))
    try:
        return bound(*args, *own)
    except KeyError as error:
        explain_missing_name(error, *args, *own)
        raise
    finally:
        _running.reset(before)


def check_interval(task: Task) -> None:
    """Check the `scheduler_interval` of a task."""
    if task.scheduler_interval not in ("epoch", "step"):
        raise TaskError(f'`scheduler_interval` of a task must be "epoch" or "step", got {task.scheduler_interval!r}')


def takes_config(task: Task) -> bool:
    """Whether the task's `step` takes the config: it has one argument after the optimizer, or any number."""
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
