"""Compares a member of an array with its plain copy after a step, or a validation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.fuse.array import ModelArray
from shoal.fuse.per_member import describe_function
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
    tensors_of,
)
from shoal.train.outside import OutsideState
from shoal.train.plain_copy import PlainCopy
from shoal.train.stepper import StepRefusedError
from shoal.train.trial_runtime import TrialRuntime, optimizers_in

__all__ = ["MemberCheck", "without_trace"]

T = TypeVar("T")

MARGIN = 32.0
"""A member may be off by this factor over what a perturbation of its parameters by one rounding unit changes. Sums in
another order round all their terms anew: a bias of attention's keys, whose gradient is nothing but rounding, was off by
12 times as much after two steps of Adam (AMD EPYC)."""

_LOSS: TensorKey = ("loss", "")


@contextmanager
def without_trace(outside: OutsideState, runtime: TrialRuntime) -> Iterator[Transaction]:
    """Restore at the end what copies of a trial change outside of models, and random generators."""
    before = outside.snapshot(runtime.model)
    try:
        yield before
    finally:
        before.restore()


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

    def _twice(self, one: PlainCopy, relative: float, run: Callable[[PlainCopy], T]) -> tuple[T, T]:
        """Let two copies of a copy do the same, the second with parameters that are off by a relative change."""
        found = []
        for each in one.twins(relative):
            with without_trace(self._outside, one.runtime):
                found.append(run(each))
        return found[0], found[1]

    def _noise_of_step(self, one: PlainCopy, dtype: torch.dtype, where: str) -> dict[TensorKey, float]:
        """Measure how rounding changes a step, as a perturbation of the parameters by one rounding unit does."""
        first, other = self._twice(one, EPSILON[dtype], one.repeat_in)
        found = Comparison.of(other.tensors(), first.tensors())
        if not (change := found.change()) <= math.sqrt(TOLERANCE[dtype]):
            raise StepRefusedError(_unrepeatable(f"by {change:.1g} of the loss", where))
        return {key: MARGIN * off for key, (_, _, off) in found.norms.items()}

    def _check_repeats(self, one: PlainCopy, dtype: torch.dtype, where: str) -> None:
        """Check that a step of a trial alone gives the same when it is taken again."""
        first, again = self._twice(one, 0.0, one.repeat_in)
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

        first, other = self._twice(one, EPSILON[dtype], validated)
        noise = {key: MARGIN * off for key, (_, _, off) in Comparison.of(other, first).norms.items()}
        if dtype != torch.float64:
            size = sum(map(size_of, batches))
            for key, (_, _, off) in differing.norms.items():
                if key[0] == "metric" and key[1] != "valid_loss" and counts_samples(off, size):
                    noise[key] = max(off, noise.get(key, 0.0))
        return noise


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
