"""The proof: plain copies of members train beside an array, and everything that a step changes is compared.

A window of a proof begins with copies of some members, made before the array is built or at a step that is due. For
each step of the window the copies take the same step in plain PyTorch, with the same batch and random numbers. Then
loss, gradients, parameters, buffers, optimizer state and attributes of copy and member are compared, and the copy takes
over the member's tensors, so that rounding does not add up. What differs by more than rounding ends the array: its
trials go back to their checkpoints, and train in plain PyTorch from there.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.core.activity import Activity
from shoal.core.errors import FusionError
from shoal.core.event import Outcome
from shoal.core.trial import Check
from shoal.fuse.array import ModelArray
from shoal.fuse.transaction import Transaction
from shoal.host.activity_clock import during
from shoal.task import Task
from shoal.train.comparison import first_difference
from shoal.train.failures import outcome_of
from shoal.train.metrics import ValidationMetrics
from shoal.train.outside import OutsideState, refuse_lasting_change, shares_outside
from shoal.train.plain_copy import MemberCheck, PlainCopy, copied_bytes, without_trace
from shoal.train.stepper import StepRefusedError
from shoal.train.trial_runtime import TrialRuntime

__all__ = ["Proof", "ProofCost", "ProofRecord"]

FIRST_STEPS, LATER_STEPS = 3, 2
"""Steps of the first window, in a row, so that carried state shows, and of a later one."""

FIRST_LATE_CHECK = 64
"""Step of the first check beyond the first window; the following ones are each at twice the step."""

ALLOWANCE_SECONDS, ALLOWANCE_SHARE = 0.02, 0.01
"""Seconds, and share of the time since the first step, that checks may take in a process before the next one begins."""

CHEAP_SECONDS = 0.02
"""Seconds of a copy's step beyond which two copies in place of three take the first step of a window, and later windows
are one step long."""

MOST_BYTES = 64 << 20
"""Bytes of copies up to which there is more than one at a time."""


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
        cost: Time of the checks of all structures; one object for all records of the process.
        outside: Name of the state outside of models that a step has changed; "" for none.
        has_trained: Whether an epoch is complete.
        proven: Step modes in which a window of several members is complete; "after plain" stands for the first array
            step after plain ones.
        too_large: Step modes in which a window was begun, but no copy fitted into the memory.
    """

    cost: ProofCost
    outside: str = ""
    has_trained: bool = False
    proven: set[str] = field(default_factory=set)
    too_large: set[str] = field(default_factory=set)
    steps: int = 0
    next_step: int = FIRST_LATE_CHECK
    validations: int = 0
    next_validation: int = 1


class Proof:
    """Compares members of one array with plain copies, and refuses the array if they differ.

    `FusedStepper` calls `begin` before it builds the array, `before_step` and `after_step` around each step, and
    `begin_validation` and `check_validation` for each validation.

    Args:
        outside: State of the trials outside of models; read only.
        record: Record of the structure; each check updates it.
        clock: Clock in seconds.
    """

    def __init__(
        self, task: Task, outside: OutsideState, record: ProofRecord, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._rows: list[Check] = []
        self._task = task
        self._record = record
        self._clock = clock
        self._due = False
        self._modes: set[str] = set()  # that were checked since the array was built
        self._last_mode = ""
        self._copies: dict[int, PlainCopy] = {}
        self._state = outside
        self._check = MemberCheck(task, outside)
        self._synchronize: Callable[[], None] = lambda: None
        self._outside: list[str] = []  # what the steps of the window have changed outside of models
        self._before: Transaction | None = None  # state outside of models before the step of a lone trial
        self._validating: dict[int, PlainCopy] = {}
        self._steps_left = 0
        self._is_expensive = False  # whether a copy's step takes long
        self._is_compared = True  # whether the copies' last step is that of the array

    @property
    def changed_outside(self) -> str:
        """Name of the state outside of models that a step has changed; "" for none."""
        return self._record.outside

    def begin(self, runtimes: Sequence[TrialRuntime], synchronize: Callable[[], None]) -> None:
        """Begin a window before an array of these trials is built.

        Args:
            synchronize: Function that copies what the array's steps have changed to the trials' models.

        Raises:
            StepRefusedError: A member cannot be copied.
        """
        self._synchronize = synchronize
        self._copies, self._modes, self._last_mode, self._due, self._steps_left = {}, set(), "", True, 0
        if len(runtimes) > 1 and (not self._record.proven or self._is_affordable()):
            self._open(runtimes)

    def before_step(
        self,
        runtimes: Sequence[TrialRuntime],
        batches: Sequence[Any],
        ticks: Sequence[int],
        mode: str,
        array: ModelArray | None,
        ends: AbstractSet[int] | None = None,
        opens: bool = True,
    ) -> None:
        """Let the copies take the step that the array is about to take; begin a window if a check is due.

        A plain step of one trial needs no copy; it is only seen whether it changes something outside of the model.

        Args:
            mode: Step mode, or "team" for a step with helpers.
            array: Array that may hold gradients which earlier steps have left; None if the members hold their own.
            ends: Members whose step is about to end, with its batches and its tick; None for all.
            opens: Whether a window may begin, as a step of each member begins.
        """
        record = self._record
        record.steps += 1
        if record.steps >= record.next_step:
            record.next_step, self._due = 2 * record.next_step, True
        modes = self._with_return(mode)
        self._due = self._due or not modes <= self._modes
        first = len(runtimes) > 1 and not modes <= record.proven | record.too_large
        if _is_plain(runtimes, mode):
            self._watch(runtimes[0])
            return
        if opens and self._due and not self._copies and (first or self._is_affordable()):
            self._open(runtimes, array)
        if self._copies and (opens or ends is None or ends & self._copies.keys()):
            self._synchronize()
            self._steps_left, self._due = max(self._steps_left, self._later_steps * self._due), False
            with self._accounted():
                if opens:  # later, models may be in the middle of their steps
                    self._renew_copies(runtimes, array)
                self._step_copies(runtimes, batches, ticks, ends)
            if not self._copies:
                record.too_large |= modes
                self._modes |= modes

    def _watch(self, runtime: TrialRuntime) -> None:
        """Begin or continue a window of the plain steps of one trial."""
        self._copies = {}
        if self._due and self._steps_left <= 0 and self._is_affordable():
            self._due, self._steps_left, self._outside = False, FIRST_STEPS, []
        if self._steps_left > 0:
            with self._accounted():
                self._before = self._state.snapshot(runtime.model)

    def _renew_copies(self, runtimes: Sequence[TrialRuntime], array: ModelArray | None) -> None:
        for b, one in self._copies.items():
            if self._is_compared and one.runtime.epoch == runtimes[b].epoch:
                continue
            # the array has not taken the copies' step, or an epoch has ended, in which the user's code may change more
            if self._is_compared and first_difference(runtimes[b].model, one.runtime.model, 0.0) is None:
                one.follow(runtimes[b])
                one.take_gradients(runtimes[b], b, array)
            else:
                self._copies[b] = _copy(self._task, runtimes[b], b, array)

    def _step_copies(
        self,
        runtimes: Sequence[TrialRuntime],
        batches: Sequence[Any],
        ticks: Sequence[int],
        ends: AbstractSet[int] | None,
    ) -> None:
        if not (ends is None or ends & self._copies.keys()):
            return
        self._is_compared = False
        changes = []
        with without_trace(self._state, runtimes[0]) as outside:
            for place, (b, one) in enumerate(list(self._copies.items())):
                if ends is not None and b not in ends:
                    continue
                if place > 1 and self._is_expensive:
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
        self._note_outside(max(changes, default=""))

    def _note_outside(self, change: str) -> None:
        self._outside.append(change)
        self._record.outside = self._record.outside or change

    def after_step(
        self,
        runtimes: Sequence[TrialRuntime],
        losses: Tensor,
        mode: str,
        array: ModelArray | None,
        ends: AbstractSet[int] | None = None,
    ) -> None:
        """Compare members with their copies after a step.

        Args:
            losses: Losses of the members, [B].
            mode: Step mode, as the step was taken.
            array: Array that may hold the members' gradients; None if they hold their own.
            ends: Members whose step has ended; None for all.

        Raises:
            StepRefusedError: A member differs from its copy.
        """
        modes, self._last_mode, self._is_compared = self._with_return(mode), mode, True
        if self._before is not None:
            with self._accounted():
                refuse_lasting_change(self._before)
                self._note_outside(self._before.changed() or "")
            self._before = None
        elif not self._copies or not (ends is None or ends & self._copies.keys()):
            return
        self._modes |= modes
        self._synchronize()
        with self._accounted(), _distrusting():
            for b, one in list(self._copies.items()):
                if ends is not None and b not in ends:
                    continue
                difference = self._check.step(one, runtimes[b], b, losses[b], mode, array)
                if difference is None:
                    del self._copies[b]
                else:
                    self._note(runtimes[b], 1, f"step, {mode}", difference)
            if len(self._outside) >= FIRST_STEPS and all(self._outside):
                raise StepRefusedError(shares_outside(self._outside[-1]))
        if ends is not None and len(ends) < len(runtimes):
            return
        self._steps_left -= 1
        if self._steps_left <= 0 or (not self._copies and len(runtimes) > 1):
            self._copies, self._steps_left = {}, 0
            if len(runtimes) > 1:
                self._record.proven |= self._modes
        else:  # one copy shows what is carried from step to step
            self._copies = dict(list(self._copies.items())[:1])
        for runtime in () if self._record.outside else runtimes:  # what trials share is in none of their checkpoints
            runtime.proven = (runtime.epoch, runtime.step + 1)

    def _with_return(self, mode: str) -> set[str]:
        """The mode, and whether the array is to take over what plain steps of its members have changed."""
        return {mode, "after plain"} if mode != "plain" and self._last_mode == "plain" else {mode}

    def begin_validation(self, runtimes: Sequence[TrialRuntime], mode: str) -> bool:
        """Count a validation, and return whether its first batches are to be checked, for which members are copied.

        Args:
            mode: Step mode, such as "eager".

        Raises:
            StepRefusedError: A member cannot be copied.
        """
        record = self._record
        if _is_plain(runtimes, mode):
            return False
        record.validations += 1
        if record.validations < record.next_validation or not (record.validations == 1 or self._is_affordable()):
            return False
        record.next_validation = 2 * record.validations
        chosen = self._chosen(runtimes, 1 if self._is_expensive or record.validations > 1 else 2)
        self._synchronize()
        with self._accounted():
            self._validating = {b: _copy(self._task, runtimes[b]) for b in chosen}
        return True

    def check_validation(
        self, runtimes: Sequence[TrialRuntime], batches: Sequence[Any], found: ValidationMetrics
    ) -> None:
        """Compare what the first validation batches of some members gave with what plain copies give; then a step.

        Raises:
            StepRefusedError: A value differs.
        """
        self._synchronize()
        copies, self._validating, self._due = self._validating, {}, True
        with self._accounted(), _distrusting():
            values = found.so_far()
            for b, one in copies.items():
                difference = self._check.validation(one, runtimes[b], batches, *values[b])
                self._note(runtimes[b], 0, "validation", difference)

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
            with without_trace(self._state, runtime):
                run(one, b)
            if type(one.error) is type(error):
                return
        raise StepRefusedError(f"an array raises {type(error).__name__}: {error}; its trials alone do not") from error

    def _note(self, runtime: TrialRuntime, ahead: int, what: str, difference: float) -> None:
        self._rows.append(Check(runtime.trial.number, runtime.epoch, runtime.step + ahead, what, difference))

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

    def _is_affordable(self) -> bool:
        cost = self._record.cost
        return cost.seconds < ALLOWANCE_SECONDS + ALLOWANCE_SHARE * (self._clock() - cost.began)

    @property
    def _later_steps(self) -> int:
        """Steps of a window that is not the first one."""
        return 1 if self._is_expensive else LATER_STEPS

    def _chosen(self, runtimes: Sequence[TrialRuntime], most: int) -> list[int]:
        """Return at most so many of a member that the study's seed draws, the first, and the last; one if large.

        The first member is never the only one of several: what all of them take over from it would not be seen.
        """
        seed = f"{runtimes[0].trial.data_seed} {self._record.steps} {self._record.validations}"
        last = len(runtimes) - 1
        drawn = random.Random(seed).randint(min(1, last), last)
        found = list(dict.fromkeys((drawn, 0, last, *range(last))))[:most]
        return found[:1] if len(found) * copied_bytes(runtimes[0]) > MOST_BYTES else found

    def _open(self, runtimes: Sequence[TrialRuntime], array: ModelArray | None = None) -> None:
        """Begin a window with three members for the first one of a structure, else with one."""
        self._synchronize()
        chosen = self._chosen(runtimes, 1 if self._record.proven else 3)
        with self._accounted():
            try:
                self._copies = {b: _copy(self._task, runtimes[b], b, array) for b in chosen}
            except StepRefusedError:
                if len(runtimes) > 1:  # one trial alone may train as it is
                    raise
        self._steps_left = self._later_steps if self._record.proven else FIRST_STEPS
        self._due, self._is_compared = False, True
        self._check.noise.clear()
        self._outside = []


@contextmanager
def _distrusting() -> Iterator[None]:
    """Let trials that are refused in the context go back before the last check that passed."""
    try:
        yield
    except StepRefusedError as refused:
        refused.since_check = True
        raise


def _copy(task: Task, runtime: TrialRuntime, b: int = 0, array: ModelArray | None = None) -> PlainCopy:
    try:
        return PlainCopy(task, runtime, b, array)
    except FusionError as error:
        raise StepRefusedError(str(error)) from error


def _is_plain(runtimes: Sequence[TrialRuntime], mode: str) -> bool:
    """Whether steps are those of one trial in plain PyTorch, of which there is nothing to prove."""
    return len(runtimes) == 1 and mode == "plain"
