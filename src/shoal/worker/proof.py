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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.core.activity import Activity
from shoal.core.errors import FusionError
from shoal.core.event import Outcome
from shoal.core.trial import Check
from shoal.cost.activity_clock import during
from shoal.fuse.array import ModelArray
from shoal.fuse.per_member import describe_function
from shoal.fuse.transaction import Transaction
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
from shoal.worker.failures import outcome_of
from shoal.worker.metrics import ValidationMetrics
from shoal.worker.outside import outside_snapshot, refuse_lasting_change, shares_outside
from shoal.worker.plain_copy import PlainCopy, copied_bytes
from shoal.worker.stepper import StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime

__all__ = ["Proof", "ProofCost", "ProofRecord"]

FIRST_STEPS, LATER_STEPS = 3, 2
"""Steps of the first window, in a row, so that carried state shows, and of a later one."""

FIRST_LATE_CHECK = 64
"""Step of the first check beyond the first window; the following ones are each at twice the step."""

ALLOWANCE_SECONDS, ALLOWANCE_SHARE = 0.05, 0.01
"""Seconds, and share of the time since the first step, that checks may take in a process before the next one begins."""

CHEAP_SECONDS = 0.02
"""Seconds of a copy's step up to which further copies take the first step of a window as well."""

MOST_BYTES = 64 << 20
"""Bytes of copies up to which there is more than one at a time."""

MARGIN = 8.0
"""A member may be off by this factor over what a perturbation of its parameters by one rounding unit changes."""

_LOSS: TensorKey = ("loss", "")


@dataclass
class ProofCost:
    """Time of the checks of all structures in one process.

    Args:
        began: Time of the first array, in seconds.
        seconds: Seconds that the checks have taken.
    """

    began: float
    seconds: float = 0.0


@dataclass
class ProofRecord:
    """State and results of the checks of all arrays of one structure in one process.

    Args:
        cost: Of all structures; shared.
        outside: What a step has changed outside of models; "" for nothing.
        proven: Ways with which a window of several members is complete.
    """

    cost: ProofCost
    outside: str = ""
    proven: set[str] = field(default_factory=set)
    steps: int = 0
    next_step: int = FIRST_LATE_CHECK
    validations: int = 0
    next_validation: int = 1


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
        self._ways: set[str] = set()  # that were checked since the array was built
        self._copies: dict[int, PlainCopy] = {}
        self._noise: dict[TensorKey, float] = {}
        """Relative differences of tensors that rounding explains, where they were measured in this window."""
        self._synchronize: Callable[[], None] = lambda: None
        self._outside: list[str] = []  # what the steps of the window have changed outside of models
        self._steps_left = 0
        self._is_expensive = False  # whether a copy's step takes long
        self._is_compared = True  # whether the copies' last step is that of the array

    @property
    def changed_outside(self) -> str:
        """What a step has changed outside of models; "" for nothing."""
        return self._record.outside

    def begin(self, runtimes: Sequence[TrialRuntime], synchronize: Callable[[], None]) -> None:
        """Begin a window before an array of these trials is built.

        Args:
            synchronize: Function that copies what the array's steps have changed to the trials' models.

        Raises:
            StepRefusedError: A member cannot be copied.
        """
        self._synchronize = synchronize
        self._copies, self._ways, self._due = {}, set(), True
        if (len(runtimes) > 1 and not self._record.proven) or self._is_affordable():
            self._open(runtimes)

    def before_step(
        self, runtimes: Sequence[TrialRuntime], batches: Sequence[Any], ticks: Sequence[int], way: str
    ) -> None:
        """Let the copies take the step that the array is about to take; begin a window if a check is due.

        Args:
            way: Way of the step, such as "eager".
        """
        record = self._record
        record.steps += 1
        if record.steps >= record.next_step:
            record.next_step, self._due = 2 * record.next_step, True
        self._due = self._due or way not in self._ways
        first = len(runtimes) > 1 and way not in record.proven
        if self._due and not self._copies and (first or self._is_affordable()):
            self._open(runtimes)
        if self._copies:
            self._synchronize()
            self._steps_left, self._due = max(self._steps_left, LATER_STEPS * self._due), False
            with self._accounted():
                self._step_copies(runtimes, batches, ticks)

    def _step_copies(self, runtimes: Sequence[TrialRuntime], batches: Sequence[Any], ticks: Sequence[int]) -> None:
        for b, one in self._copies.items():
            if self._is_compared and one.runtime.epoch == runtimes[b].epoch:
                continue
            # the array has not taken the copies' step, or an epoch has ended, in which the user's code may change more
            if self._is_compared and first_difference(runtimes[b].model, one.runtime.model, 0.0) is None:
                one.follow(runtimes[b])
            else:
                self._copies[b] = _copy(self._task, runtimes[b])
        self._is_compared = False
        changes = []
        with self._without_trace(runtimes[0]) as outside:
            for b, one in list(self._copies.items()):
                if self._is_expensive:
                    del self._copies[b]
                    continue
                began = self._clock()
                one.step(runtimes[b], batches[b], ticks[b])
                self._is_expensive = self._is_expensive or self._clock() - began > CHEAP_SECONDS
                if one.error is not None and outcome_of(one.error) is Outcome.OUT_OF_MEMORY:
                    del self._copies[b]  # the array may have the memory that it lacked
                changes.append(outside.changed() or "")
                outside.restore()
                refuse_lasting_change(outside)
        self._outside.append(max(changes, default=""))
        self._record.outside = self._record.outside or self._outside[-1]

    def after_step(self, runtimes: Sequence[TrialRuntime], losses: Tensor, way: str, array: ModelArray | None) -> None:
        """Compare members with their copies after a step.

        Args:
            losses: Losses of the members, [B].
            way: Way of the step, as it was taken.
            array: Array that may hold the members' gradients; None if they hold their own.

        Raises:
            StepRefusedError: A member differs from its copy.
        """
        if not self._copies:
            return
        self._ways.add(way)
        self._is_compared = True
        self._synchronize()
        with self._accounted():
            for b in list(self._copies):
                self._compare(b, runtimes[b], losses[b], way, array)
        if len(self._outside) >= FIRST_STEPS and all(self._outside):
            raise StepRefusedError(shares_outside(self._outside[-1]))
        self._steps_left -= 1
        if self._steps_left <= 0 or not self._copies:
            self._copies = {}
            if len(runtimes) > 1:
                self._record.proven |= self._ways
        else:  # one copy shows what is carried from step to step
            self._copies = dict([next(iter(self._copies.items()))])
        for runtime in () if self._record.outside else runtimes:  # what trials share is in none of their checkpoints
            runtime.proven = (runtime.epoch, runtime.step + 1)

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
        self._synchronize()
        chosen, self._due = self._chosen(runtimes), True
        several = 1 if self._is_expensive or self._record.validations > 1 else 2
        with self._accounted():
            values = found.so_far()
            for b in chosen[:several]:
                self._compare_validation(runtimes[b], batches, *values[b])

    def refuse_unless_own(
        self, error: Exception, runtimes: Sequence[TrialRuntime], run: Callable[[PlainCopy, int], None]
    ) -> None:
        """Refuse the array for an error of a step or validation, unless a member raises it in plain PyTorch as well.

        Args:
            run: Function that lets the copy of a member do the same, by its index.

        Raises:
            StepRefusedError: No member raises an error of this class.
        """
        if outcome_of(error) not in (Outcome.RAISED, Outcome.REJECTED):
            return
        for b, runtime in enumerate(runtimes):
            one = _copy(self._task, runtime)
            with self._without_trace(runtime):
                run(one, b)
            if type(one.error) is type(error):
                return
        raise StepRefusedError(f"an array raises {type(error).__name__}: {error}; its trials alone do not") from error

    def take_rows(self) -> tuple[Check, ...]:
        """Return the checks since the last call."""
        rows, self._rows = tuple(self._rows), []
        return rows

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Count the time in the context as that of checks."""
        began = self._clock()
        with during(Activity.CHECKS):
            try:
                yield
            finally:
                self._record.cost.seconds += self._clock() - began

    @contextmanager
    def _without_trace(self, runtime: TrialRuntime) -> Iterator[Transaction]:
        """Restore at the end what copies of a trial change outside of models, and random generators."""
        outside = outside_snapshot(self._task, runtime.model)
        try:
            yield outside
        finally:
            outside.restore()

    def _is_affordable(self) -> bool:
        cost = self._record.cost
        return cost.seconds < ALLOWANCE_SECONDS + ALLOWANCE_SHARE * (self._clock() - cost.began)

    def _chosen(self, runtimes: Sequence[TrialRuntime]) -> list[int]:
        """Return a member that the study's seed draws, the first one, and the last one."""
        seed = f"{runtimes[0].trial.data_seed} {self._record.steps} {self._record.validations}"
        return list(dict.fromkeys((random.Random(seed).randrange(len(runtimes)), 0, len(runtimes) - 1)))

    def _open(self, runtimes: Sequence[TrialRuntime]) -> None:
        """Begin a window: at first of three members, unless copies are large, later of one."""
        self._synchronize()
        chosen = self._chosen(runtimes)
        if self._record.proven or len(chosen) * copied_bytes(runtimes[0]) > MOST_BYTES:
            chosen = chosen[:1]
        with self._accounted():
            try:
                self._copies = {b: _copy(self._task, runtimes[b]) for b in chosen}
            except StepRefusedError:
                if len(runtimes) > 1:  # one trial alone may train as it is
                    raise
        self._steps_left = LATER_STEPS if self._record.proven else FIRST_STEPS
        self._due, self._is_compared = False, True
        self._noise.clear()
        self._outside = []

    def _compare(self, b: int, runtime: TrialRuntime, loss: Tensor, way: str, array: ModelArray | None) -> None:
        one = self._copies[b]
        where = f"trial {runtime.trial.number}, step {runtime.step + 1} of epoch {runtime.epoch + 1}, {way}"
        if one.error is not None:
            raise StepRefusedError(_raises_alone(one.error, where)) from one.error
        if not (one.loss.isfinite() or loss.isfinite()):
            del self._copies[b]  # what follows is not finite either
            return
        got = {_LOSS: loss, **tensors_of(runtime, b, None if way == "plain" else array)}
        want = {_LOSS: one.loss, **tensors_of(one.runtime)}
        if way in ("captured", "compiled") or all(v is None for k, v in got.items() if k[0] == "gradient"):
            # a graph leaves those of an earlier step, and a step after which an array is dropped leaves none
            got, want = ({k: v for k, v in each.items() if k[0] != "gradient"} for each in (got, want))
        dtype, found = compute_dtype(runtime, loss), Comparison.of(got, want)
        self._check(found, dtype, runtime, where, lambda: self._noise_of_step(one, dtype, where))
        if (differing := first_difference(runtime.model, one.runtime.model, TOLERANCE[dtype])) is not None:
            raise StepRefusedError(f"{differing} ({where}, {_location(self._task, runtime, _LOSS)})")
        one.follow(runtime)
        trial = runtime.trial.number
        self._rows.append(Check(trial, runtime.epoch, runtime.step + 1, f"step, {way}", found.largest(self._noise)))

    def _check(
        self,
        found: Comparison,
        dtype: torch.dtype,
        runtime: TrialRuntime,
        where: str,
        measure: Callable[[], Mapping[TensorKey, float]],
    ) -> None:
        """Check that rounding explains a comparison; `measure` finds how much it explains, where that is in doubt."""
        if found.beyond(dtype, self._noise) is None:
            return
        for key, change in measure().items():
            self._noise[key] = max(self._noise.get(key, 0.0), change)
        if (wrong := found.beyond(dtype, self._noise)) is not None:
            raise StepRefusedError(f"{found.describe(wrong)} ({where}, {_location(self._task, runtime, wrong)})")

    def _noise_of_step(self, one: PlainCopy, dtype: torch.dtype, where: str) -> dict[TensorKey, float]:
        """Measure how rounding changes a step, as a perturbation of the parameters by one rounding unit does."""
        changes = one.sensitivity(EPSILON[dtype], partial(self._without_trace, one.runtime))
        if not changes[_LOSS] <= math.sqrt(TOLERANCE[dtype]):
            raise StepRefusedError(
                f"two runs of a step in plain PyTorch differ by {changes[_LOSS]:.1g} of the loss ({where}), so the "
                "program depends on more than data and seeds (a clock, a file, the order of atomic additions); set "
                "`exact = False` in the task to train its trials as one nevertheless"
            )
        return {key: MARGIN * change for key, change in changes.items()}

    def _noise_of_validation(
        self, one: PlainCopy, dtype: torch.dtype, batches: Sequence[Any], want: Mapping[TensorKey, Tensor | None]
    ) -> dict[TensorKey, float]:
        """Measure how rounding changes metrics, in the same way; those that count samples change by whole ones."""
        with self._without_trace(one.runtime):
            other = _metric_tensors(one.perturbed(EPSILON[dtype]).validate(batches)[0])
        counts = 0.0 if dtype == torch.float64 else 2 / sum(map(size_of, batches))
        return {key: MARGIN * change + counts for key, change in Comparison.of(other, want).relative().items()}

    def _compare_validation(
        self, runtime: TrialRuntime, batches: Sequence[Any], metrics: Mapping[str, float], outputs: Any
    ) -> None:
        where = f"trial {runtime.trial.number}, validation of epoch {runtime.epoch + 1}"
        one = _copy(self._task, runtime)
        with self._without_trace(runtime):
            alone, alone_outputs = one.validate(batches)
        if one.error is not None:
            raise StepRefusedError(_raises_alone(one.error, where)) from one.error
        if metrics.keys() != alone.keys():
            raise StepRefusedError(f"fused metrics are {[*metrics]}, alone {[*alone]} ({where})")
        got, want = _metric_tensors(metrics), _metric_tensors(alone)
        dtype, found = compute_dtype(runtime, one.loss), Comparison.of(got, want)
        self._check(found, dtype, runtime, where, lambda: self._noise_of_validation(one, dtype, batches, want))
        if (differing := first_difference(outputs, alone_outputs, TOLERANCE[dtype], "outputs")) is not None:
            raise StepRefusedError(f"{differing} ({where})")
        self._rows.append(
            Check(runtime.trial.number, runtime.epoch, runtime.step, "validation", found.largest(self._noise))
        )


def _copy(task: Task, runtime: TrialRuntime) -> PlainCopy:
    try:
        return PlainCopy(task, runtime)
    except FusionError as error:
        raise StepRefusedError(str(error)) from error


def _raises_alone(error: Exception, where: str) -> str:
    return f"in plain PyTorch it raises {type(error).__name__}: {error}, and in the array it does not ({where})"


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
