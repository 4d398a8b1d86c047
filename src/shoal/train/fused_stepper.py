"""Trains trials of one structure as a fused array, or in plain PyTorch if fusing is impossible or slower."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial, update_wrapper
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.core.event import Outcome
from shoal.core.trial import step_seed
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.api import fuse, stack
from shoal.fuse.backward import MemberSteps
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.frozen import is_shared, unshare_small
from shoal.fuse.generators import DrawDetector, PythonRngSnapshot, seeded
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.table import has_unmodified_step
from shoal.fuse.per_member import tensors_in
from shoal.fuse.rows import dense_parts
from shoal.fuse.scaler import GradScaler, LossScale
from shoal.fuse.step import StepMode, TrainingStep, modes_to_try
from shoal.task import Task, size_of
from shoal.train.custom_step import CustomStep
from shoal.train.failures import outcome_of
from shoal.train.kept_gradients import enter_array, uncleared
from shoal.train.metrics import ForwardReuse, ValidationMetrics, task_loss, validation_values
from shoal.train.outside import WATCHED_CALLS
from shoal.train.proof import Proof
from shoal.train.step_settings import MicroBatch, mixes_steps
from shoal.train.stepper import MixedEpochsError, PlainStepper, Stepper, StepRefusedError, TeamGradients, shared_changed
from shoal.train.trial_runtime import TrialRuntime, optimizers_in, train_modes_kept

__all__ = ["FusedStepper", "epochs_differ"]

_log = logging.getLogger("shoal.train")

_logged: set[type] = set()
"""Tasks whose reason to validate trials one after another was logged."""

COMPARED_BATCHES = 2
"""Validation batches whose values are compared: the second may reuse outputs, which the first does not."""


class FusedStepper(Stepper):
    """Trains trials of one structure as one array, unless plain steps prove faster.

    `proof` compares members with plain copies.
    """

    def __init__(
        self,
        task: Task,
        runtimes: Sequence[TrialRuntime],
        profile: Profile | None = None,
        compiling: CaptureDecision | None = None,
        proof: Proof | None = None,
    ) -> None:
        self._task = task
        self.runtimes = list(runtimes)
        self._proof = proof
        self._begun = False  # whether a step was taken
        self._part_losses: Tensor | None = None  # of the batches so far of the members' steps, [B]
        if proof is not None:
            proof.begin(runtimes, self.synchronize)
        for runtime in runtimes:  # former members of another array still share its memory
            unshare_small(runtime.model)
        self._profile, self._compiling = profile, compiling
        self._new_profile: Profile | None = None
        self._gain: float | None = None
        self._fuse()

    @property
    def _mixes_steps(self) -> bool:
        return mixes_steps(runtime.settings for runtime in self.runtimes)

    def _fuse(self) -> None:
        task, runtimes = self._task, self.runtimes
        self._plain: PlainStepper | None = None
        self._array = fuse([x.model for x in runtimes], [x.trial.seed for x in runtimes], strict=False)
        self._one_by_one = self._array.partial or any(map(_has_custom_step, runtimes))
        self._steps: TrainingStep | CustomStep
        if type(task).step is not Task.step:
            self._steps = CustomStep(self._array, runtimes, task)
            enter_array(self._array, [runtime.gradients for runtime in runtimes])
        else:
            lead = runtimes[0]
            if name := uncleared(lead.model, optimizers_in(lead.optimizer), lead.settings.max_norm):
                raise FusionError(
                    f"no optimizer has `{name}`, whose gradients then add up from step to step and count for "
                    "`clip_norm`; freeze it by requires_grad_(False), or give it to the optimizer"
                )
            optimizer = fuse_optimizers([x.optimizer for x in runtimes], self._array)
            loss = update_wrapper(partial(task_loss, task, runtimes[0].autocast), task.loss)
            scaler = GradScaler.of(self._array, _loss_scales(runtimes))
            max_norms = _max_norms(runtimes)
            modes: tuple[StepMode, ...] = ("eager", "captured", "compiled")
            if not self._mixes_steps:
                modes = modes_to_try(self._profile, len(runtimes))
            self._steps = TrainingStep(
                self._array,
                optimizer,
                loss,
                modes,
                self._compiling or (lambda seconds: False),
                max_norm=max_norms,
                scaler=scaler,
                profile=self._profile,
            )
        self._reuse = ForwardReuse()
        measure = partial(validation_values, task, runtimes[0].autocast, self._reuse)
        self._measure = update_wrapper(measure, task.metrics)
        self._has_measured = False
        self._validator: PlainStepper | None = None
        """Validates the members one after another, if their validation cannot run at once."""
        self._watched_steps, self._shared_sums = 0, {}
        if len(runtimes) == 1:  # no copy beside it shows what a step writes to memory that other trials use
            self._shared_sums = _shared_sums(runtimes[0].model)
            self._validate_members()

    @property
    def new_profile(self) -> Profile | None:
        """The profile with the measurements of the first steps; None if it has not changed."""
        if self._plain is None and isinstance(self._steps, TrainingStep):
            return self._steps.new_profile
        return self._new_profile

    @property
    def gain(self) -> float | None:
        """Speed-up of fused steps over plain ones; None unless both were timed."""
        if self._plain is None and isinstance(self._steps, TrainingStep):
            return self._steps.gain
        return self._gain

    @property
    def settled(self) -> bool:
        """Whether the fastest step mode was found."""
        return self._plain is not None or not isinstance(self._steps, TrainingStep) or self._steps.mode is not None

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """Take one step: fused, or in plain PyTorch if that was faster."""
        mode = self._next_mode(None if self.settled else self._mixed_batch(batches)[1])
        return self._proven(partial(self._step, batches, ticks), batches, ticks, mode)

    def train_part(self, part: MicroBatch, first_tick: int) -> Tensor:
        """Train on a batch: all members at once, or those whose step ends in plain PyTorch, if that was faster."""
        if self._plain is None and "eager" not in modes_to_try(self._profile, len(self.runtimes)):
            self._switch_to_plain()
        steps = [part.steps.get(b, (batch, 0)) for b, batch in enumerate(part.batches)]
        batches, ticks = [batch for batch, _ in steps], [first_tick + part.number - before for _, before in steps]
        given, opens = _member_steps(part) if self._plain is None else None, len(part.begins) == len(self.runtimes)
        take = partial(self._take_part, part, given, first_tick)
        return self._proven(take, batches, ticks, self._next_mode(given), part.steps.keys(), opens)

    def _proven(
        self,
        take: Callable[[], Tensor],
        batches: Sequence[Any],
        ticks: Sequence[int],
        mode: str,
        ends: AbstractSet[int] | None = None,
        opens: bool = True,
    ) -> Tensor:
        """Take a step, with copies beside it; `ends` and `opens` as for `Proof.before_step`."""
        if self._proof is not None:
            array = None if self._plain is not None else self._array
            self._proof.before_step(self.runtimes, batches, ticks, mode, array, ends, opens)
        try:
            losses = take()
        except (StepRefusedError, MixedEpochsError):
            raise
        except Exception as error:
            if self._plain is None:
                self._refuse_unless_own(error, batches, ticks)
            raise
        if self._shared_sums and self._watched_steps < WATCHED_CALLS:
            self._watched_steps += 1
            for name, now in _shared_sums(self.runtimes[0].model).items():
                if now != self._shared_sums[name]:
                    raise shared_changed(self._task, name, self.runtimes[0].model.get_parameter(name))
        if self._proof is not None:
            array = None if self._plain is not None else self._array
            self._proof.after_step(self.runtimes, losses, self._mode, array, ends)
        return losses

    def _take_part(self, part: MicroBatch, given: MemberSteps | None, first_tick: int) -> Tensor:
        if self._plain is not None:
            return self._plain.train_part(part, first_tick)
        assert given is not None
        ticks = (first_tick + part.number,) * len(self.runtimes)
        self._array.ticks = ticks
        self._begun = True
        try:
            with self._checked_draws(ticks, owner="each step"):
                losses = self._steps(given)
        except FusionError as error:
            raise StepRefusedError(str(error)) from error
        if self._part_losses is not None and not given.begins.all():
            begins = given.to(losses.device).begins
            losses = losses + self._part_losses.masked_fill(begins, 0)
        self._part_losses = losses
        return losses

    def _refuse_unless_own(self, error: Exception, batches: Sequence[Any], ticks: Sequence[int]) -> None:
        """Refuse the array for an error of a step, unless it is known to be that of the user's code."""
        if self._proof is not None:
            runtimes = self.runtimes
            self._proof.refuse_unless_own(error, runtimes, lambda one, b: one.step(runtimes[b], batches[b], ticks[b]))
        elif outcome_of(error) is Outcome.RAISED:
            raise StepRefusedError(f"{type(error).__name__}: {error}") from error  # plain training raises what is own

    @property
    def _mode(self) -> str:
        """Step mode of the last step."""
        return self._steps.last_mode if self._plain is None else "plain"

    def _next_mode(self, batch: Any = None) -> str:
        """Step mode of the next step; with a batch of the array, also if its shapes are not those that are timed."""
        if self._plain is not None:
            return "plain"
        if batch is None or not isinstance(self._steps, TrainingStep):
            return self._steps.next_mode
        return self._steps.mode_of(batch)

    def _step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        if self._plain is not None:
            return self._plain.train_step(batches, ticks)
        mixed, batch = self._mixed_batch(batches)
        self._array.ticks = tuple(ticks)
        self._begun = True
        try:
            with self._checked_draws(ticks, mixed):
                losses = self._steps(batch)
        except FusionError as error:
            if mixed:
                raise MixedEpochsError(error, corrupted=True) from error
            raise StepRefusedError(str(error)) from error
        if isinstance(self._steps, TrainingStep) and self._steps.stays_plain:
            self._switch_to_plain()
        return losses

    def synchronize(self) -> None:
        """As for `Stepper`."""
        if self._begun and self._plain is None:
            try:
                self._steps.synchronize()
            except FusionError as error:
                raise StepRefusedError(str(error), since_check=True) from error

    @property
    def indivisible(self) -> str:
        """As for `Stepper`."""
        if type(self._task).step is not Task.step:
            return "the task overrides `step`"
        if self._mixes_steps:
            return "the members' steps have different numbers of batches"
        if self._plain is None and self._array.partial:
            return "the models differ in a part that runs member by member"
        return self.refusal

    def team_step(self, gradients: TeamGradients, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor | None:
        """As for `Stepper`; the first step is taken without helpers."""
        if not self._begun:
            return None
        if self._plain is not None:
            self._profile = self._new_profile or self._profile  # which names the fastest mode of steps without helpers
            self._fuse()
        steps = self._steps
        if not isinstance(steps, TrainingStep):
            return None
        mixed, batch = self._mixed_batch(batches)
        self._array.ticks = tuple(ticks)
        if self._proof is not None:
            self._proof.before_step(self.runtimes, batches, ticks, "team", self._array)
        try:
            context = partial(self._checked_draws, ticks, mixed)
            losses = gradients(steps, batch, self.runtimes[0].settings.precision, context)
            steps.update()
        except FusionError as error:
            if mixed:
                raise MixedEpochsError(error, corrupted=True) from error
            raise StepRefusedError(str(error)) from error
        if self._compiling is not None:
            self._compiling.steps -= 1
        if self._proof is not None:
            self._proof.after_step(self.runtimes, losses, "team", self._array)
        return losses

    def _mixed_batch(self, batches: Sequence[Any]) -> tuple[bool, Any]:
        """Whether the trials are at different epochs, and the batch of the array."""
        mixed = epochs_differ(self.runtimes)
        try:
            return mixed, stack(batches) if mixed else batches[0]
        except FusionError as reason:
            raise MixedEpochsError(reason) from reason

    def _switch_to_plain(self) -> None:
        """Drop the array and train in plain PyTorch."""
        self.synchronize()
        self._new_profile, self._gain = self.new_profile, self.gain
        self._plain = PlainStepper(self._task, self.runtimes, keep_shared=True)
        for parameter in self._array.parameters():
            parameter.grad = None
        del self._array, self._steps, self._measure, self._reuse, self._validator

    @contextmanager
    def _checked_draws(
        self, ticks: Sequence[int], mixed: bool = False, validating: bool = False, owner: str = ""
    ) -> Iterator[None]:
        """Seed the process-wide generators for a step, and refuse draws that should differ between members.

        Members at one epoch that run at once draw what each draws alone, and in plain steps they are seeded one by one.
        """
        lead = self.runtimes[0]
        with seeded([step_seed(lead.trial.data_seed, tick) for tick in ticks], lead.device):
            if len(self.runtimes) == 1 or not (mixed or owner or self._one_by_one):
                yield
                return
            torchs, others = DrawDetector(lead.device), PythonRngSnapshot()
            yield
            if (validating or self._mode != "plain") and (torchs() or others.has_drawn()):
                owner = owner or ("each epoch" if mixed else "each member")
                raise FusionError(
                    "random numbers are drawn past torch's own functions (by Python, NumPy, a script), of which "
                    f"{owner} has its own"
                )

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Validate all members in one pass over the batches."""
        if self._plain is not None:
            return self._plain.validate(batches)
        found = ValidationMetrics(self._task, self.runtimes)
        proof = self._proof
        if proof is not None and not proof.begin_validation(self.runtimes, self._next_mode()):
            proof = None
        first: list[Any] = []  # batches to compare
        with train_modes_kept(self.runtimes), torch.no_grad():
            self._array.eval()
            self._reuse.begin_pass()
            if self._validator is not None:
                self._validator.begin_pass()
            for number, batch in enumerate(batches, start=1):
                size = size_of(batch)
                if proof is not None and number <= COMPARED_BATCHES:
                    first.append(lazy_clone(batch))  # a model may write to its input
                if self._validator is None and (values := self._measured(batch, number)) is not None:
                    found.add(*values, size)
                if self._validator is not None:
                    found.add_each(self._measured_alone(self._validator, batch, number), size)
                if proof is not None and number == COMPARED_BATCHES:
                    proof.check_validation(self.runtimes, first, found)
            if proof is not None and 0 < len(first) < COMPARED_BATCHES:
                proof.check_validation(self.runtimes, first, found)
            if self._validator is not None:
                self._array.state.sync_from_members(search=True)
            self._array.train()
        self._array.state.sync_train_modes()
        return found.per_trial()

    def _measured(self, batch: Any, number: int) -> tuple[Any, Any] | None:
        """Validate a batch for all members at once; return None if that fails: they run one by one from now on."""
        self._array.ticks = ticks = (-number,) * len(self.runtimes)
        given = batch if self._has_measured else lazy_clone(batch)  # which a failed run may have written to
        versions = self._versions(batch)
        try:
            with self._checked_draws(ticks, validating=True):
                values: tuple[Any, Any] = self._array.map(self._measure, given)
                self._has_measured = True
        except Exception as error:  # the members raise what is the user's own
            if outcome_of(error) is Outcome.OUT_OF_MEMORY:
                raise
            if self._has_measured:  # the failed run is not rolled back, so the array begins anew from its members
                if self._versions(batch) != versions:
                    raise StepRefusedError(f"{error}, in a validation that writes to the model or its batch") from error
                self._profile = self.new_profile or self._profile
                for runtime in self.runtimes:
                    runtime.gradients.leave()
                self._fuse()
                self._array.eval()
            self._validate_members()
            if type(self._task) not in _logged:
                _logged.add(type(self._task))
                _log.warning("trials of an array validate one after another: %s", error)
            return None
        return values

    def _measured_alone(self, validator: PlainStepper, batch: Any, number: int) -> list[tuple[dict[str, Any], Any]]:
        """Validate a batch for one member after another."""
        state = self._array.state
        state.sync_before_member_runs()
        values = validator.validate_each(batch, -number)
        for b in range(len(self.runtimes)):
            state.commit_member(b)
        return values

    def _validate_members(self) -> None:
        """Validate the members one after another from now on."""
        self._validator = PlainStepper(self._task, self.runtimes, in_array=True)

    def _versions(self, batch: Any) -> list[int]:
        """Versions of all that a validation may write to in place."""
        return [each._version for each in (*self._array.state.tensors(), *tensors_in(batch)) if not each.is_inference()]


def _member_steps(part: MicroBatch) -> MemberSteps:
    """The batch of an array: what members have in common is shared, the rest is stacked."""
    members, first = range(len(part.batches)), part.batches[0]
    leaves, specs = zip(*map(pytree.tree_flatten, part.batches), strict=True)
    try:
        columns = [x[0] if all(y is x[0] for y in x) else stack(list(x)) for x in zip(*leaves, strict=True)]
    except FusionError as error:
        raise StepRefusedError(str(error)) from error
    batch = first if all(each is first for each in part.batches) else pytree.tree_unflatten(columns, specs[0])
    weights = torch.tensor(part.weights, dtype=torch.float64)
    masks = ([b in which for b in members] for which in (part.begins, part.steps))
    return MemberSteps(batch, weights, *map(torch.tensor, masks))


def epochs_differ(runtimes: Sequence[TrialRuntime]) -> bool:
    """Return whether trials are at different epochs."""
    return len({runtime.epoch for runtime in runtimes}) > 1


def _has_custom_step(runtime: TrialRuntime) -> bool:
    """Return whether an optimizer's step runs a class or hook of the user, which may draw random numbers."""
    optimizers = optimizers_in(runtime.optimizer)
    return any(
        not type(one).__module__.startswith("torch.optim.") or not has_unmodified_step(one) for one in optimizers
    )


def _max_norms(runtimes: Sequence[TrialRuntime]) -> list[float] | None:
    """Return the maximum gradient norm of each trial, infinite if it has no limit; None if no trial has a limit."""
    max_norms = [runtime.settings.max_norm for runtime in runtimes]
    return None if max_norms == [None] * len(max_norms) else [inf if norm is None else norm for norm in max_norms]


def _loss_scales(runtimes: Sequence[TrialRuntime]) -> list[LossScale]:
    """Return the loss scales of the trials. Either all trials of an array have one, or none."""
    return [runtime.loss_scale for runtime in runtimes if runtime.loss_scale is not None]


def _shared_sums(model: nn.Module) -> dict[str, int]:
    """Sums of the bits of frozen parameters in memory that other trials use, by name."""
    shared = {name: each for name, each in model.named_parameters() if is_shared(each)}
    return {name: sum(map(_bits_sum, dense_parts(each))) for name, each in shared.items()}


def _bits_sum(part: Tensor) -> int:
    data = part.detach().contiguous().reshape(-1)
    words = torch.uint8 if data.nbytes % 4 else torch.int32
    return int(data.view(words).sum(dtype=torch.int64))
