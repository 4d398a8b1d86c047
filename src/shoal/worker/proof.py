"""The proof: plain copies of members train beside an array, and everything that a step changes is compared.

A window of a proof begins with copies of some members, made before the array is built or at a step that is due. For
each step of the window the copies take the same step in plain PyTorch, with the same batch and random numbers. Then
loss, gradients, parameters, buffers, optimizer state and attributes of copy and member are compared, and the copy takes
over the member's tensors, so that rounding does not add up. What differs by more than rounding ends the array: its
trials go back to their checkpoints, and train in plain PyTorch from there.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import FusionError
from shoal.core.trial import Check
from shoal.fuse.array import ModelArray
from shoal.fuse.per_member import describe_function
from shoal.task import Task, size_of
from shoal.worker.comparison import (
    EPSILON,
    TOLERANCE,
    Comparison,
    TensorKey,
    compute_dtype,
    first_difference,
    tensors_of,
)
from shoal.worker.metrics import ValidationMetrics
from shoal.worker.plain_copy import PlainCopy, copied_bytes
from shoal.worker.stepper import StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime

__all__ = ["Proof", "ProofRecord"]

MIN_STEPS, STEPS_AFTER_CHANGE, MAX_STEPS = 3, 2, 12
"""Steps of a window: at least three in a row, so that carried state shows, and two after the last change of the way."""

FIRST_LATE_CHECK = 64
"""Step of the first check beyond the first window; the following ones are each at twice the step."""

ALLOWANCE_SECONDS, ALLOWANCE_SHARE = 0.2, 0.015
"""Seconds, and share of the time since the first step, that checks may take in a process, beside the first window of
each way."""

ALL_MEMBERS_BYTES, ALL_MEMBERS_SECONDS = 64 << 20, 1.0
"""Bytes of the copies, and seconds of their steps in a window, up to which all members are checked at first."""

MARGIN = 8.0
"""A member may be off by this factor over what a perturbation of its parameters by one rounding unit changes."""

_LOSS: TensorKey = ("loss", "")


@dataclass
class ProofRecord:
    """What the checks of all arrays of one structure in one process have shown.

    Args:
        began: Time of the first array, in seconds.
        seconds: Seconds that the checks have taken.
        proven: Ways with which a window is complete.
        noise: Relative differences of tensors that rounding explains, where they were measured.
    """

    began: float
    seconds: float = 0.0
    proven: set[str] = field(default_factory=set)
    steps: int = 0
    next_step: int = FIRST_LATE_CHECK
    validations: int = 0
    next_validation: int = 1
    noise: dict[TensorKey, float] = field(default_factory=dict)


class Proof:
    """Checks of one array.

    Args:
        record: Record of the structure; changed.
        clock: Clock in seconds.
    """

    def __init__(self, task: Task, record: ProofRecord, clock: Callable[[], float] = time.perf_counter) -> None:
        self._rows: list[Check] = []
        self._task = task
        self._record = record
        self._clock = clock
        self._due = False
        self._way = ""
        self._ways: set[str] = set()
        """Ways of the window."""
        self._copies: dict[int, PlainCopy] = {}
        self._window_steps, self._since_change = 0, 0
        self._is_compared = True  # whether the copies' last step is that of the array

    def begin(self, runtimes: Sequence[TrialRuntime]) -> None:
        """Begin a window before an array of these trials is built.

        Raises:
            StepRefusedError: A member cannot be copied.
        """
        self._copies, self._way, self._due = {}, "", True
        if not self._record.proven or self._is_affordable():
            self._open(runtimes, first=not self._record.proven)

    def before_step(
        self, runtimes: Sequence[TrialRuntime], batches: Sequence[Any], ticks: Sequence[int], way: str
    ) -> None:
        """Let the copies take the step that the array is about to take; begin a window if a check is due.

        Args:
            way: Way in which the array is expected to take the step.
        """
        self._record.steps += 1
        self._due = self._due or self._way not in ("", way)
        if self._record.steps >= self._record.next_step:
            self._record.next_step, self._due = 2 * self._record.next_step, True
        first = way not in self._record.proven
        if not self._copies and self._due and (first or self._is_affordable()):
            self._open(runtimes, first)
        began = self._clock()
        for b, one in self._copies.items():
            if self._is_compared and one.runtime.epoch == runtimes[b].epoch:
                continue
            # the array has not taken the copies' step, or an epoch has ended, in which the user's code may change more
            if self._is_compared and first_difference(runtimes[b].model, one.runtime.model, 0.0) is None:
                one.follow(runtimes[b])
            else:
                self._copies[b] = _copy(self._task, runtimes[b])
        self._is_compared = False
        for b, one in self._copies.items():
            one.step(runtimes[b], batches[b], ticks[b])
        taken = self._clock() - began
        self._record.seconds += taken
        if self._window_steps == 0 and taken * MIN_STEPS > ALL_MEMBERS_SECONDS and len(self._copies) > 3:
            self._copies = {b: self._copies[b] for b in self._chosen(runtimes)}

    def after_step(self, runtimes: Sequence[TrialRuntime], losses: Tensor, way: str, array: ModelArray | None) -> None:
        """Compare members with their copies after a step.

        Args:
            losses: Losses of the members, [B].
            way: Way of the step, such as "eager".
            array: Array that may hold the members' gradients; None if they hold their own.

        Raises:
            StepRefusedError: A member differs from its copy.
        """
        changed, self._way = way != self._way, way
        if not self._copies:
            self._due = self._due or changed
            return
        began, self._is_compared = self._clock(), True
        self._since_change = 0 if changed else self._since_change + 1
        self._window_steps += 1
        self._ways.add(way)
        for b in list(self._copies):
            self._compare(b, runtimes[b], losses[b], array)
        enough = self._window_steps >= MIN_STEPS and self._since_change >= STEPS_AFTER_CHANGE
        if enough or self._window_steps >= MAX_STEPS:
            self._copies = {}
            self._record.proven |= self._ways
        self._record.seconds += self._clock() - began

    def wants_validation(self) -> bool:
        """Count a validation, and return whether its first batch is to be checked."""
        self._record.validations += 1
        if self._record.validations < self._record.next_validation or not (
            self._record.validations == 1 or self._is_affordable()
        ):
            return False
        self._record.next_validation = 2 * self._record.validations
        return True

    def check_validation(
        self, runtimes: Sequence[TrialRuntime], batches: Sequence[Any], found: ValidationMetrics
    ) -> None:
        """Compare what the first validation batches of some members gave with what plain copies give; then a step.

        Raises:
            StepRefusedError: A value differs, or a member cannot be copied.
        """
        began, self._due = self._clock(), True
        values = found.so_far()
        for b in self._chosen(runtimes):
            self._compare_validation(runtimes[b], batches, *values[b])
        self._record.seconds += self._clock() - began

    def take_rows(self) -> tuple[Check, ...]:
        """Return the checks since the last call."""
        rows, self._rows = tuple(self._rows), []
        return rows

    def _is_affordable(self) -> bool:
        return self._record.seconds < ALLOWANCE_SECONDS + ALLOWANCE_SHARE * (self._clock() - self._record.began)

    def _chosen(self, runtimes: Sequence[TrialRuntime]) -> list[int]:
        """Return the first member, the last one, and one that the study's seed draws."""
        seed = f"{runtimes[0].trial.data_seed} {self._record.steps} {self._record.validations}"
        return sorted({0, len(runtimes) - 1, random.Random(seed).randrange(len(runtimes))})

    def _open(self, runtimes: Sequence[TrialRuntime], first: bool) -> None:
        """Begin a window: the first one of a way of all members if that is cheap, a later one of one."""
        began = self._clock()
        chosen = self._chosen(runtimes)
        if not first:
            chosen = [chosen[self._record.steps % len(chosen)]]
        elif sum(map(copied_bytes, runtimes)) <= ALL_MEMBERS_BYTES:
            chosen = list(range(len(runtimes)))
        self._copies = {b: _copy(self._task, runtimes[b]) for b in chosen}
        self._window_steps, self._since_change, self._due, self._is_compared = 0, 0, False, True
        self._ways = set()
        self._record.seconds += self._clock() - began

    def _compare(self, b: int, runtime: TrialRuntime, loss: Tensor, array: ModelArray | None) -> None:
        one = self._copies[b]
        where = f"trial {runtime.trial.number}, step {runtime.step + 1} of epoch {runtime.epoch + 1}, {self._way}"
        if one.error is not None:
            raise StepRefusedError(
                f"in plain PyTorch the step raises {type(one.error).__name__}: {one.error}, and in the array it does "
                f"not ({where})"
            ) from one.error
        if not (one.loss.isfinite() or loss.isfinite()):
            del self._copies[b]  # what follows is not finite either
            return
        got = {_LOSS: loss, **tensors_of(runtime, b, None if self._way == "plain" else array)}
        want = {_LOSS: one.loss, **tensors_of(one.runtime)}
        if self._way in ("captured", "compiled") or not any(
            v is not None for k, v in got.items() if k[0] == "gradient"
        ):
            # a graph leaves those of an earlier step, and a step after which an array is dropped leaves none
            got, want = ({k: v for k, v in each.items() if k[0] != "gradient"} for each in (got, want))
        dtype, found = compute_dtype(runtime, loss), Comparison.of(got, want)
        wrong = found.beyond(dtype, self._record.noise)
        if wrong is not None:
            self._measure_noise(one, dtype, where)
            wrong = found.beyond(dtype, self._record.noise)
        if wrong is not None:
            raise StepRefusedError(f"{found.describe(wrong)} ({where}, {_location(self._task, runtime, wrong)})")
        if (differing := first_difference(runtime.model, one.runtime.model, TOLERANCE[dtype])) is not None:
            raise StepRefusedError(f"{differing} ({where}, {_location(self._task, runtime, _LOSS)})")
        one.follow(runtime)
        trial = runtime.trial.number
        self._rows.append(Check(trial, runtime.epoch, runtime.step + 1, f"step, {self._way}", found.largest))

    def _measure_noise(self, one: PlainCopy, dtype: torch.dtype, where: str) -> None:
        """Measure how rounding changes a step, as a perturbation of the parameters by one rounding unit does."""
        changes = one.sensitivity(EPSILON[dtype])
        if not changes[_LOSS] <= math.sqrt(TOLERANCE[dtype]):
            raise StepRefusedError(
                f"two runs of a step in plain PyTorch differ by {changes[_LOSS]:.1g} of the loss ({where}), so the "
                "program depends on more than data and seeds (a clock, a file, the order of atomic additions); set "
                "`exact = False` in the task to train its trials as one nevertheless"
            )
        for key, change in changes.items():
            self._record.noise[key] = max(self._record.noise.get(key, 0.0), MARGIN * change)

    def _compare_validation(
        self, runtime: TrialRuntime, batches: Sequence[Any], metrics: Mapping[str, float], outputs: Any
    ) -> None:
        where = f"trial {runtime.trial.number}, validation of epoch {runtime.epoch + 1}"
        one = _copy(self._task, runtime)
        alone, alone_outputs = one.validate(batches)
        if metrics.keys() != alone.keys():
            raise StepRefusedError(f"fused metrics are {[*metrics]}, alone {[*alone]} ({where})")
        got, want = _metric_tensors(metrics), _metric_tensors(alone)
        dtype, found = compute_dtype(runtime, one.loss), Comparison.of(got, want)
        wrong = found.beyond(dtype, self._record.noise)
        if wrong is not None:
            other = _metric_tensors(one.perturbed(EPSILON[dtype]).validate(batches)[0])
            for key, change in Comparison.of(other, want).relative().items():
                counts = 0.0 if dtype == torch.float64 else 2 / sum(map(size_of, batches))  # as an accuracy changes
                self._record.noise[key] = max(self._record.noise.get(key, 0.0), MARGIN * change + counts)
            wrong = found.beyond(dtype, self._record.noise)
        if wrong is not None:
            raise StepRefusedError(f"{found.describe(wrong)} ({where}, {_location(self._task, runtime, wrong)})")
        if (differing := first_difference(outputs, alone_outputs, TOLERANCE[dtype], "outputs")) is not None:
            raise StepRefusedError(f"{differing} ({where})")
        self._rows.append(Check(runtime.trial.number, runtime.epoch, runtime.step, "validation", found.largest))


def _copy(task: Task, runtime: TrialRuntime) -> PlainCopy:
    try:
        return PlainCopy(task, runtime)
    except FusionError as error:
        raise StepRefusedError(str(error)) from error


def _metric_tensors(metrics: Mapping[str, Any]) -> dict[TensorKey, Tensor | None]:
    return {("metric", name): torch.as_tensor(value) for name, value in metrics.items()}


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
