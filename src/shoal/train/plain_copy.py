"""Copies of a trial that train beside it in plain PyTorch, and their comparison with the trial."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.array import ModelArray
from shoal.fuse.frozen import is_shared, large_frozen, of_same_memory, record_shared
from shoal.fuse.model_copy import copy_training
from shoal.fuse.per_member import describe_function
from shoal.fuse.quantised import weight_states
from shoal.fuse.rows import bytes_of, is_packed, storage_address
from shoal.fuse.stacked import Stacked
from shoal.fuse.transaction import Transaction
from shoal.task import Task, size_of
from shoal.train.comparison import (
    EPSILON,
    TOLERANCE,
    Comparison,
    TensorKey,
    compute_dtype,
    counts_samples,
    first_difference,
    is_same_memory,
    tensors_of,
)
from shoal.train.kept_gradients import KeptGradients
from shoal.train.metrics import ValidationMetrics
from shoal.train.outside import OutsideState
from shoal.train.stepper import PlainStepper, StepRefusedError
from shoal.train.trial_runtime import TrialRuntime, optimizers_in

__all__ = [
    "MARGIN",
    "BuildSnapshot",
    "MemberCheck",
    "PlainCopy",
    "copied_bytes",
    "copy_trial",
    "perturb",
    "without_trace",
]

MARGIN = 32.0
"""A member may be off by this factor over what a perturbation of its parameters by one rounding unit changes. Sums in
another order round all their terms anew: a bias of attention's keys, whose gradient is nothing but rounding, was off by
12 times as much after two steps of Adam (AMD EPYC)."""

KINK_UNITS = 256
"""A step in float32 or float64 may also be off by what a perturbation by so many rounding units changes. Rounding takes
an activation across the kink of a ReLU, and a gradient then changes by all that a sample adds to it. Of 240 steps of a
small MobileNet in float32, 31 were off by more than `MARGIN` explains, and one by more than this does."""

T = TypeVar("T")
_LOSS: TensorKey = ("loss", "")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class PlainCopy:
    """A copy of a trial. Large frozen parameters are not copied.

    The caller restores the state outside of the copy that its steps change (lists, globals, variables that the task's
    methods name).

    Args:
        b: Index of the trial in the array.
        array: Array that may hold the trial's gradients, which an earlier step has left.

    Raises:
        FusionError: The trial cannot be copied.
    """

    def __init__(self, task: Task, runtime: TrialRuntime, b: int = 0, array: ModelArray | None = None) -> None:
        self.runtime = copy_trial(runtime)
        self.take_gradients(runtime, b, array)
        if not runtime.step:
            self.runtime.set_train_mode(train=True)  # as after the build, or after a validation
        self.loss = torch.tensor(torch.nan)
        self.error: Exception | None = None
        """Exception of the last step; None without one."""
        self._task = task
        self._stepper = PlainStepper(task, [self.runtime], check_draws=True, keep_shared=True)
        self._last: tuple[Any, int] = (None, 0)

    def step(self, runtime: TrialRuntime, batch: Any, tick: int) -> None:
        """Take a step with the settings that the trial's optimizers have now; `loss` or `error` is its result."""
        self._last = batch, tick
        for own, one in zip(optimizers_in(self.runtime.optimizer), optimizers_in(runtime.optimizer), strict=True):
            for own_group, group in zip(own.param_groups, one.param_groups, strict=False):
                own_group |= {name: value for name, value in group.items() if name != "params"}
        try:
            self.loss = self._stepper.train_step([lazy_clone(batch)], [tick])[0]
            if isinstance(self.loss, Stacked):
                raise FusionError("its loss depends on a tensor that a step of the array has put outside of its model")
        except Exception as error:  # raised if the array's step does not raise it
            self.error = error

    def validate(self, batches: Sequence[Any]) -> tuple[Mapping[str, float], list[Any]]:
        """Return metrics and outputs of the first validation batches; none if one raises an `error`.

        `loss` is that of the last batch.
        """
        self.runtime.set_train_mode(train=False)
        found = ValidationMetrics(self._task, [self.runtime])
        try:
            with torch.no_grad():
                for number, batch in enumerate(batches, start=1):
                    values = self._stepper.validate_batch(0, lazy_clone(batch), -number, reuse=False)
                    self.loss = values[0]["valid_loss"]
                    found.add_each([values], size_of(batch))
        except Exception as error:
            self.error = error
        return found.so_far()[0]

    @torch.no_grad()
    def follow(self, runtime: TrialRuntime) -> None:
        """Take over parameters, buffers and optimizer state of the trial."""
        theirs = tensors_of(runtime)
        for key, own in tensors_of(self.runtime).items():
            value = theirs.get(key)
            if key[0] == "gradient" or own is None or value is None or is_same_memory(own, value):
                continue
            if own.shape == value.shape and own.layout is torch.strided:
                own.detach().copy_(value)
        self.runtime.epoch = runtime.epoch

    def take_gradients(self, runtime: TrialRuntime, b: int = 0, array: ModelArray | None = None) -> None:
        """Take over the gradients of the trial, which are its parameters' own or rows of those of the array."""
        own = dict(self.runtime.model.named_parameters())
        theirs = dict(runtime.model.named_parameters())
        for (kind, name), grad in tensors_of(runtime, b, array).items():
            if kind == "gradient" and name in own and own[name] is not theirs[name]:
                grad = grad if theirs[name].grad is None else theirs[name].grad
                own[name].grad = None if grad is None else grad.detach().clone()

    def twin(self, relative: float | None = None) -> "PlainCopy":
        """Return a copy of this copy; with `relative`, its parameters are off by this change with random signs."""
        copied = PlainCopy(self._task, self.runtime)
        if relative is not None:
            perturb(copied.runtime.model, relative, 0)
        return copied

    def repeat_in(self, other: "PlainCopy") -> "PlainCopy":
        """Let another copy take a step as the last one was; return it."""
        batch, tick = self._last
        other.step(self.runtime, batch, tick)
        return other

    def tensors(self) -> dict[TensorKey, Tensor | None]:
        """Return the loss of the last step, and the tensors of the trial."""
        return {("loss", ""): self.loss, **tensors_of(self.runtime)}


@torch.no_grad()
def perturb(model: nn.Module, relative: float, seed: int) -> None:
    """Change the parameters by a relative difference of random sign, except those shared or without values so far."""
    generator = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        if (each.is_floating_point() or each.is_complex()) and not (is_lazy(each) or is_shared(each)):
            signs = torch.randint(0, 2, each.shape, generator=generator).to(each.device) * 2 - 1
            each.add_(each * signs * relative)


def copied_bytes(runtime: TrialRuntime) -> int:
    """Return the bytes of a copy of a trial, with gradients and optimizer state as large as its parameters."""
    parameters = list(runtime.model.parameters())
    trained = bytes_of(each for each in parameters if each.requires_grad)
    return 3 * trained + bytes_of(parameters) - bytes_of(large_frozen(runtime.model))


def copy_trial(runtime: TrialRuntime) -> TrialRuntime:
    """Copy model, optimizers and loss scale of a trial; parameters and state that are rows of an array become whole.

    Large frozen parameters use the memory of the trial's.

    Raises:
        FusionError: The trial cannot be copied.
    """
    model = runtime.model
    frozen = large_frozen(model)
    memo: dict[int, Any] = {id(each): each for each in weight_states(model)}
    memo |= {id(each): of_same_memory(each) for each in frozen}
    record_shared(each for one in frozen for each in (one, memo[id(one)]))
    leaves, spec = pytree.tree_flatten(runtime.optimizer)
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Optimizer)]
    optimizers = list({id(one): one for one in (*leaves, *held)}.values())
    if any(getattr(one, kind, None) for one in optimizers for kind in _HOOKS):
        raise FusionError("an optimizer has hooks around its step, whose variables a copy of it would share")
    with _WholeCopies():
        copied, copies = copy_training(model, optimizers, memo)
    own = dict(zip(map(id, optimizers), copies, strict=True))
    return replace(
        runtime,
        model=copied,
        gradients=KeptGradients(copied, runtime.gradients.kept),
        optimizer=pytree.tree_unflatten([own[id(one)] for one in leaves], spec),
        scheduler=None,
        carried=None,
        reports=[],
        average={},
        loss_scale=None if runtime.loss_scale is None else replace(runtime.loss_scale),
    )


class MemberCheck:
    """Compares members with their copies."""

    def __init__(self, task: Task, outside: OutsideState) -> None:
        self.noise: dict[TensorKey, float] = {}
        """Norms of differences that rounding explains, where they were measured."""
        self._task, self._outside = task, outside

    def step(
        self, one: PlainCopy, runtime: TrialRuntime, b: int, loss: Tensor, mode: str, array: ModelArray | None
    ) -> float | None:
        """Compare a trial with its copy after both have taken a step; the copy then takes over what rounding changed.

        Args:
            b: Index of the trial in the array.
            mode: Step mode, as the step was taken.
            array: Array that may hold the gradients; None if the trial holds its own.

        Returns:
            The largest relative difference; None if losses are not finite, and what follows is not to be compared.

        Raises:
            StepRefusedError: They differ by more than rounding.
        """
        where = f"trial {runtime.trial.number}, step {runtime.step + 1} of epoch {runtime.epoch + 1}, {mode}"
        _check_error(one, where)
        if not (one.loss.isfinite() or loss.isfinite()):
            return None
        got = {_LOSS: loss, **tensors_of(runtime, b, None if mode == "plain" else array)}
        want = one.tensors()
        left_out = self._unread_gradients(runtime)
        if mode in ("captured", "compiled") or all(v is None for k, v in got.items() if k[0] == "gradient"):
            # a graph leaves those of an earlier step, and a step after which an array is dropped leaves none
            left_out = {key for key in got if key[0] == "gradient"}
        got, want = ({key: value for key, value in each.items() if key not in left_out} for each in (got, want))
        dtype, found = compute_dtype(runtime, loss), Comparison.of(got, want)
        wrong = self._beyond(found, dtype, lambda: self._noise_of_step(one, dtype, where))
        if wrong is not None and (relative := KINK_UNITS * EPSILON[dtype]) < TOLERANCE[dtype]:
            wrong = found.beyond(dtype, self._noise_with_kinks(one, relative))
        differing = first_difference(runtime.model, one.runtime.model, TOLERANCE[dtype])
        if wrong is not None or differing is not None:
            self._check_repeats(one, dtype, where)
            text = differing if wrong is None else found.describe(wrong)
            raise StepRefusedError(f"{text} ({where}, {_location(self._task, runtime, wrong or _LOSS)})")
        one.follow(runtime)
        return found.largest(self.noise)

    def validation(
        self,
        one: PlainCopy,
        runtime: TrialRuntime,
        batches: Sequence[Any],
        metrics: Mapping[str, float],
        outputs: Any,
    ) -> float:
        """Let the copy of a trial validate batches, and compare; return the largest relative difference.

        Args:
            metrics: Metrics of the trial for the batches.
            outputs: What the task keeps of their outputs.

        Raises:
            StepRefusedError: They differ by more than rounding.
        """
        where = f"trial {runtime.trial.number}, validation of epoch {runtime.epoch + 1}"
        with without_trace(self._outside, runtime):
            alone, alone_outputs = one.validate(batches)
        _check_error(one, where)
        if metrics.keys() != alone.keys():
            raise StepRefusedError(f"metrics are {[*metrics]} in the array, and {[*alone]} alone ({where})")
        dtype = compute_dtype(runtime, one.loss)
        found = Comparison.of(_validated(metrics, runtime), _validated(alone, one.runtime))
        wrong = self._beyond(found, dtype, lambda: self._noise_of_validation(one, dtype, batches, found))
        if wrong is not None:
            raise StepRefusedError(f"{found.describe(wrong)} ({where}, {_location(self._task, runtime, wrong)})")
        differing = first_difference(outputs, alone_outputs, TOLERANCE[dtype], "outputs")
        differing = differing or first_difference(runtime.model, one.runtime.model, TOLERANCE[dtype])
        if differing is not None:
            raise StepRefusedError(f"{differing} ({where})")
        return found.largest(self.noise)

    def _unread_gradients(self, runtime: TrialRuntime) -> set[TensorKey]:
        """Gradients that no optimizer reads, nor clipping, nor a step of the user's own."""
        if type(self._task).step is not Task.step or runtime.settings.max_norm is not None:
            return set()
        groups = [group for one in optimizers_in(runtime.optimizer) for group in one.param_groups]
        read = {id(each) for group in groups for each in group["params"]}
        return {("gradient", name) for name, each in runtime.model.named_parameters() if id(each) not in read}

    def _beyond(
        self, found: Comparison, dtype: torch.dtype, measure: Callable[[], Mapping[TensorKey, float]]
    ) -> TensorKey | None:
        """Return the first tensor whose difference rounding does not explain, or None.

        Args:
            measure: Function that finds how much rounding explains, where that is in doubt.
        """
        if found.beyond(dtype, self.noise) is None:
            return None
        for key, change in measure().items():
            self.noise[key] = max(self.noise.get(key, 0.0), change)
        return found.beyond(dtype, self.noise)

    def _run_twins(self, one: PlainCopy, run: Callable[[PlainCopy], T], *relatives: float) -> list[T]:
        """Let copies of a copy do the same: first an equal one, then one for each relative change of parameters."""
        found = []
        for each in map(one.twin, (None, *relatives)):
            with without_trace(self._outside, one.runtime):
                found.append(run(each))
        return found

    def _noise_of_step(self, one: PlainCopy, dtype: torch.dtype, where: str) -> dict[TensorKey, float]:
        """Measure how rounding changes a step, as a perturbation of the parameters by one rounding unit does."""
        first, other = self._run_twins(one, one.repeat_in, EPSILON[dtype])
        found = Comparison.of(other.tensors(), first.tensors())
        if not (change := found.change()) <= math.sqrt(TOLERANCE[dtype]):
            raise StepRefusedError(_unrepeatable(f"by {change:.1g} of the loss", where))
        return {key: MARGIN * off for key, (_, _, off) in found.norms.items()}

    def _noise_with_kinks(self, one: PlainCopy, relative: float) -> dict[TensorKey, float]:
        """Return `noise` with what a relative change across kinks of activations adds, for this step alone."""
        noise = dict(self.noise)
        first, *others = self._run_twins(one, one.repeat_in, relative, -relative)
        for other in others:
            for key, (_, _, off) in Comparison.of(other.tensors(), first.tensors()).norms.items():
                noise[key] = max(noise.get(key, 0.0), off)
        return noise

    def _check_repeats(self, one: PlainCopy, dtype: torch.dtype, where: str) -> None:
        """Check that a step of a trial alone gives the same when it is taken again."""
        first, again = self._run_twins(one, one.repeat_in, 0.0)
        key = Comparison.of(again.tensors(), first.tensors()).beyond(dtype, {})
        text = first_difference(again.runtime.model, first.runtime.model, TOLERANCE[dtype])
        if key is not None or text is not None:
            what = " of ".join(filter(None, key or ())) or str(text).split("`")[1]
            raise StepRefusedError(_unrepeatable(f"in `{what}`", where))

    def _noise_of_validation(
        self, one: PlainCopy, dtype: torch.dtype, batches: Sequence[Any], differing: Comparison
    ) -> dict[TensorKey, float]:
        """Measure how rounding changes metrics, in the same way; those that count samples change by whole ones."""

        def validated(each: PlainCopy) -> dict[TensorKey, Tensor | None]:
            return _validated(each.validate(batches)[0], each.runtime)

        first, other = self._run_twins(one, validated, EPSILON[dtype])
        noise = {key: MARGIN * off for key, (_, _, off) in Comparison.of(other, first).norms.items()}
        if dtype != torch.float64:
            size = sum(map(size_of, batches))
            for key, (_, _, off) in differing.norms.items():
                if key[0] == "metric" and key[1] != "valid_loss" and counts_samples(off, size):
                    noise[key] = max(off, noise.get(key, 0.0))
        return noise


@contextmanager
def without_trace(outside: OutsideState, runtime: TrialRuntime) -> Iterator[Transaction]:
    """Restore at the end what copies of a trial change outside of models, and random generators."""
    before = outside.snapshot(runtime.model)
    try:
        yield before
    finally:
        before.restore()


class BuildSnapshot:
    """Snapshot of what steps of copies of a trial may change in the trial itself.

    Copies share functions, such as hooks, and the variables that these close over; some copies share frozen parameters.
    """

    def __init__(self, runtime: TrialRuntime) -> None:
        self._runtime = runtime
        self._before = self._fingerprint()
        lent = [each for each in large_frozen(runtime.model) if not is_shared(each)]
        self._sums = [(each, _sum(each)) for each in lent if each.layout is torch.strided and not is_packed(each)]
        owners = (*runtime.model.modules(), *optimizers_in(runtime.optimizer))
        held: list[Any] = [leaf for each in owners for leaf in pytree.tree_leaves(getattr(each, "__dict__", {}))]
        held = [leaf for leaf in held if not isinstance(leaf, (Tensor, nn.Module))]
        held += [vars(leaf) for leaf in held if isinstance(leaf, FunctionType)]
        self._shared = Transaction(functions=held, left_out=[runtime.model])

    def changed(self) -> bool:
        """Return whether anything has changed since the snapshot."""
        if self._shared.changed() is not None or self._fingerprint() != self._before:
            return True
        return any(_sum(each) != before for each, before in self._sums)

    def _fingerprint(self) -> object:
        model, carried = self._runtime.model, self._runtime.carried
        tensors = [each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)]
        attributes = {} if carried is None else carried.attributes()
        return (
            [(0 if one.is_inference() else one._version, storage_address(one), one.requires_grad) for one in tensors],
            {place: value for place, value in attributes.items() if place[0].startswith(("model", "optimizer"))},
        )


class _WholeCopies(TorchFunctionMode):
    """Copies rows of an array without the other rows, and tensors of a graph without the graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and (not args[0].is_leaf or _is_row(args[0])):
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _is_row(tensor: Tensor) -> bool:
    """Whether a tensor is a part of larger memory."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def _check_error(one: PlainCopy, where: str) -> None:
    if one.error is not None:
        text = f"in plain PyTorch it raises {type(one.error).__name__}: {one.error}, and in the array it does not"
        raise StepRefusedError(f"{text} ({where})") from one.error


def _unrepeatable(what: str, where: str) -> str:
    return (
        f"two runs of a step in plain PyTorch differ {what} ({where}), so the program depends on more than data and "
        "seeds (a clock, a file, the order of atomic additions); set `exact = False` in the task to train its trials "
        "as one nevertheless"
    )


def _validated(metrics: Mapping[str, Any], runtime: TrialRuntime) -> dict[TensorKey, Tensor | None]:
    """Return the metrics of a validation, and the buffers, which it rarely changes."""
    buffers: dict[TensorKey, Tensor | None] = {("buffer", name): each for name, each in runtime.model.named_buffers()}
    return {**{("metric", name): torch.as_tensor(value) for name, value in metrics.items()}, **buffers}


def _location(task: Task, runtime: TrialRuntime, key: TensorKey) -> str:
    """Return the user's function that computes a tensor: of the innermost user-defined module with it, or the task."""
    kind, name = key
    path = name.partition(":")[0] if kind not in ("loss", "metric") else None
    while path:
        path = path.rpartition(".")[0]
        module = dict(runtime.model.named_modules()).get(path)
        if module is not None and not type(module).__module__.startswith("torch."):
            return describe_function(type(module).forward)
    if kind == "metric" and name != "valid_loss":
        return describe_function(task.metrics)
    return describe_function(task.loss if type(task).step is Task.step else task.step)


def _sum(tensor: Tensor) -> float:
    """Sum of a frozen parameter, which also changes with writes by `.data`, such as a momentum encoder's."""
    return float(tensor.detach().sum(dtype=torch.float64))
