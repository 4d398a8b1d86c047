"""Steppers, which train and validate several trials: the base class, and the implementation in plain PyTorch."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.core.trial import step_seed
from shoal.fuse.backward import backward_alone
from shoal.fuse.frozen import is_lent, is_shared, unshare, unshare_small
from shoal.fuse.generators import seed_all
from shoal.fuse.optim.unfused_step import UnfusedStep
from shoal.fuse.per_member import MemberRunner, member_batch
from shoal.fuse.step import TrainingStep
from shoal.task import Task, call, size_of, takes_config
from shoal.train.bases import base_changed, bases_of, lent_parameters, read_only
from shoal.train.metrics import ForwardReuse, ValidationMetrics, task_loss, validation_values
from shoal.train.outside import WATCHED_CALLS, OutsideState
from shoal.train.step_settings import MicroBatch
from shoal.train.trial_runtime import TrialRuntime, check_scalar, train_modes_kept

__all__ = ["MixedEpochsError", "PlainStepper", "StepRefusedError", "Stepper", "TeamGradients", "shared_changed"]


WRITES, UNSHARED = "a step or a validation", "a frozen parameter in shared memory is changed or unfrozen"


class MixedEpochsError(Exception):
    """Trials at different epochs cannot be one array; if `corrupted`, a step with wrong results was taken before."""

    def __init__(self, reason: object, corrupted: bool = False) -> None:
        super().__init__(str(reason))
        self.corrupted = corrupted


class StepRefusedError(Exception):
    """A step did what this stepper does not support; the trials continue from their checkpoints in plain PyTorch.

    `trial` is the number of a trial that cannot draw its own random numbers even when it trains alone, else None.
    """

    def __init__(self, reason: str, trial: int | None = None, since_check: bool = False) -> None:
        super().__init__(reason)
        self.trial = trial
        self.since_check = since_check
        """Whether steps since the last check that passed may have been wrong, so that the trials go back before it."""


class TeamGradients(Protocol):
    """Computes the gradients of a step together with helpers; see `shoal.train.team.leader.TeamLeader.gradients`."""

    def __call__(
        self, step: TrainingStep, batch: Any, precision: str, context: Callable[[], AbstractContextManager[None]]
    ) -> Tensor:
        """Return the losses, [B]."""


class Stepper(ABC):
    """Trains trials that are at the same step of an epoch, batch by batch; their epochs may differ.

    `ArrayTrainer` calls `train_step` for each step of an epoch, then `validate`, until the trials of the array change.
    """

    runtimes: list[TrialRuntime]
    refusal = ""
    """Reason why trials of one structure cannot be an array; "" if they can, or if no step has shown otherwise yet."""

    may_be_array = False
    """Whether this is a single trial in plain PyTorch because an array would not pay, which helpers need."""

    @property
    def new_profile(self) -> Profile | None:
        """The profile with new measurements of the structure; None if there are none."""
        return None

    @property
    def gain(self) -> float | None:
        """Speed-up of fused steps over plain ones; None unless both were timed."""
        return None

    @property
    def settled(self) -> bool:
        """Whether the fastest step mode was found."""
        return True

    @abstractmethod
    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """Take one step of every trial.

        Args:
            batches: Batch of each trial; trials that share a batch have the same object.
            ticks: Number of batches of each trial before this step, which determines its random numbers together with
                its seed.

        Returns:
            The losses, shape [B].

        Raises:
            MixedEpochsError: The trials are at different epochs and therefore cannot be one array.
            StepRefusedError: The stepper cannot train these trials.
        """

    @abstractmethod
    def train_part(self, part: MicroBatch, first_tick: int) -> Tensor:
        """Train on a batch of trials whose steps have different numbers of batches.

        Args:
            first_tick: Number of batches before the pass.

        Returns:
            The losses, shape [B], of the steps that end with the batch; others are of no use.

        Raises:
            StepRefusedError: As for `train_step`.
        """

    def synchronize(self) -> None:  # noqa: B027  # plain steps change the models themselves
        """Copy all changes by steps to the trials' own models; call it before these models are used otherwise.

        Raises:
            StepRefusedError: A change cannot be copied to a trial's model.
        """

    @property
    def indivisible(self) -> str:
        """Reason why helpers cannot compute gradients of these trials; "" if none is known."""
        return self.refusal or "the trials train in plain PyTorch"

    def team_step(self, gradients: "TeamGradients", batches: Sequence[Any], ticks: Sequence[int]) -> Tensor | None:
        """As `train_step`, but helpers compute a part of the gradients, for steppers that are not `indivisible`.

        Returns:
            The losses, shape [B]; None, with nothing changed, if the step must be taken without helpers.
        """
        return None

    @abstractmethod
    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Return the metrics and `valid_loss` of each trial, averaged over the samples.

        The random numbers of a trial follow from its seed and the ticks -1, -2, ..., so they are the same at every
        epoch.

        Raises:
            StepRefusedError: The stepper cannot validate these trials.
        """


class PlainStepper(Stepper):
    """Trains trials one after another, each as a plain loop over its model and optimizer.

    Args:
        global_rng: Numbers of trials that draw from the process-wide generators, seeded with the trial's seed, since
            their models cannot draw the random numbers of an array (dropout under re-entrant checkpointing).
        keep_shared: Whether large frozen parameters stay in memory that other trials use. It requires that the trials
            did not change them as an array.
        in_array: Whether the trials are members of an array, whose memory they keep; they only validate.
        outside: State outside of models; None if the trials share it.
    """

    def __init__(
        self,
        task: Task,
        runtimes: Sequence[TrialRuntime],
        global_rng: AbstractSet[int] = frozenset(),
        check_draws: bool = False,
        keep_shared: bool = False,
        outside: OutsideState | None = None,
        in_array: bool = False,
    ) -> None:
        self.runtimes = list(runtimes)
        self._task = task
        self._outside = outside
        self._trials = [
            _PlainTrial(task, runtime, runtime.trial.number not in global_rng, check_draws) for runtime in runtimes
        ]
        for trial in () if in_array else self._trials:
            trial.unshare(keep_shared)

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """Take one step of each trial."""
        members, losses = len(self._trials), []
        for b, (trial, batch, tick) in enumerate(zip(self._trials, batches, ticks, strict=True)):
            with self._own_outside(b, "step"):
                losses.append(trial.step(member_batch(batch, b, members), tick))
        return torch.stack(losses)

    def train_part(self, part: MicroBatch, first_tick: int) -> Tensor:
        """Take the steps that end with the batch, each of all of its batches."""
        losses = torch.zeros(len(self._trials), device=self.runtimes[0].device)
        for b, (step, before) in part.steps.items():
            with self._own_outside(b, "step"):
                losses[b] = self._trials[b].step(step, first_tick + part.number - before)
        return losses

    def _own_outside(self, b: int, what: str) -> AbstractContextManager[None]:
        runtime = self.runtimes[b]
        return nullcontext() if self._outside is None else self._outside.of(runtime.trial.number, runtime.model, what)

    def validate_batch(self, b: int, batch: Any, tick: int, reuse: bool = True) -> tuple[dict[str, Any], Any]:
        """Return loss and metrics of a trial, and its outputs, for a validation batch; without `reuse` of outputs."""
        if not reuse:
            self._trials[b].reuse = ForwardReuse(observes=False)
        with self._own_outside(b, "validation"):
            return self._trials[b].validate_batch(batch, tick)

    def validate_each(self, batch: Any, tick: int) -> list[tuple[dict[str, Any], Any]]:
        """Return loss and metrics of each trial, and its outputs, for a validation batch."""
        members = len(self._trials)
        return [self.validate_batch(b, member_batch(batch, b, members), tick) for b in range(members)]

    def begin_pass(self) -> None:
        """Begin a pass over the validation set."""
        for trial in self._trials:
            trial.reuse.begin_pass()

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Validate all trials in one pass over the batches."""
        found = ValidationMetrics(self._task, self.runtimes)
        with train_modes_kept(self.runtimes), torch.no_grad():
            for runtime in self.runtimes:
                runtime.set_train_mode(train=False)
            self.begin_pass()
            for number, batch in enumerate(batches, start=1):
                found.add_each(self.validate_each(batch, -number), size_of(batch))
            for runtime in self.runtimes:
                runtime.set_train_mode(train=True)
        return found.per_trial(lambda b: self._own_outside(b, "evaluate"))


class _PlainTrial:
    """One trial of a `PlainStepper`, which documents the arguments."""

    def __init__(self, task: Task, runtime: TrialRuntime, per_member_rng: bool, check_draws: bool) -> None:
        self.reuse = ForwardReuse()
        self._task = task
        self._runtime = runtime
        self._check_draws = check_draws
        self._run = MemberRunner(runtime.trial.seed, runtime.device, check_draws) if per_member_rng else None
        self._custom_step = type(task).step is not Task.step
        self._config = runtime.trial.config if self._custom_step and takes_config(task) else None
        self._update = None if self._custom_step else UnfusedStep(runtime.optimizer)
        self._watched: Counter[Any] = Counter()
        self._shared_frozen = _versions(lent_parameters(runtime.model))
        """Name -> frozen parameter in memory that other trials use, and its version."""

    def unshare(self, keep_large: bool) -> None:
        """Give the trial its own copy of frozen parameters in shared memory, or of the small ones only.

        Those of a base stay where they are.
        """
        model = self._runtime.model
        unshare_small(model)
        shared = {name: each for name, each in model.named_parameters() if is_shared(each)}
        if not keep_large:
            for each in shared.values():
                if not is_lent(each):
                    unshare(each)
            shared = {name: each for name, each in shared.items() if is_lent(each)}
        self._shared_frozen = _versions(shared)

    def step(self, batch: Any, tick: int) -> Tensor:
        """Take one training step; return the loss, detached."""
        if self._update is None:
            loss: Tensor = self._call_seeded(self._call_custom_step, tick, batch)
            self._check_shared_frozen()
            return loss.detach()
        self._update.zero_grad()
        runtime, scale = self._runtime, self._runtime.loss_scale
        loss = backward_alone(
            runtime.model,
            runtime.optimizer,
            lambda later, part: self._call_seeded(self._loss, tick + later, part, reseeded=not later),
            batch,
            scale,
            runtime.settings.max_norm,
        )
        self._check_shared_frozen()
        if scale is None or not scale.overflowed:
            self._update()
        if scale is not None:
            scale.update()
            if isinstance(runtime.optimizer, Optimizer):
                runtime.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a skipped step
        return loss

    def validate_batch(self, batch: Any, tick: int) -> tuple[dict[str, Any], Any]:
        """Return loss and metrics, and the outputs, of a validation batch."""
        found: tuple[dict[str, Any], Any] = self._call_seeded(self._validation_values, tick, batch)
        self._check_shared_frozen()
        return found

    def _call_seeded(self, fn: Any, tick: int, batch: Any, reseeded: bool = True) -> Any:
        """Call a function of model and batch with the random numbers of a tick; within a step they continue.

        The first calls may not write to memory that other trials use.
        """
        self._watched[fn.__name__] += 1
        watched = self._shared_frozen if self._watched[fn.__name__] <= WATCHED_CALLS else {}
        with read_only({name: each for name, (each, _) in watched.items()}, self._refused_write):
            return self._call_with_numbers(fn, tick, batch, reseeded)

    def _call_with_numbers(self, fn: Any, tick: int, batch: Any, reseeded: bool) -> Any:
        trial, model = self._runtime.trial, self._runtime.model
        if self._run is None:
            seed_all(step_seed(trial.seed, tick), self._runtime.device)
            return fn(model, batch)
        if reseeded:
            seed_all(step_seed(trial.data_seed, tick), self._runtime.device)
        try:
            return self._run(fn, tick, model, batch)
        except FusionError as error:
            raise StepRefusedError(str(error), trial.number if self._check_draws else None) from error

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        return task_loss(self._task, self._runtime.autocast, model, batch)

    def _validation_values(self, model: nn.Module, batch: Any) -> tuple[dict[str, Any], Any]:
        return validation_values(self._task, self._runtime.autocast, self.reuse, model, batch)

    def _call_custom_step(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = call(self._task, "step", model, batch, self._runtime.optimizer, config=self._config)
        check_scalar("loss", loss)
        return loss

    def _check_shared_frozen(self) -> None:
        """Check that frozen parameters in shared memory have not been written to or unfrozen."""
        for name, (each, version) in self._shared_frozen.items():
            if each.requires_grad or each._version != version:
                raise shared_changed(self._task, name, each)

    def _refused_write(self, name: str) -> Exception:
        each, _ = self._shared_frozen[name]
        return base_changed(WRITES, name) if is_lent(each) else StepRefusedError(UNSHARED)


def shared_changed(task: Task, name: str, parameter: Tensor) -> Exception:
    """Return the error for a frozen parameter in memory that other trials use, after a step has changed it."""
    if not is_lent(parameter):
        return StepRefusedError(UNSHARED)
    bases_of(task, parameter.device).drop()
    return base_changed(WRITES, name)


def _versions(parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {name: (each, each._version) for name, each in parameters.items()}
