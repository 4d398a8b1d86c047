"""Steppers take training steps of several trials and validate them: the base class, and the one in plain PyTorch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.core.trial import step_seed
from shoal.fuse.frozen import is_shared, unshare, unshare_small
from shoal.fuse.generators import seed_all
from shoal.fuse.micro_batches import micro_batches, total, weighted
from shoal.fuse.optim.unfused_step import UnfusedStep
from shoal.fuse.per_member import MemberRunner, member_batch
from shoal.task import Task, call, size_of, takes_config
from shoal.worker.metrics import ValidationMetrics, loss_of, measured
from shoal.worker.trial_runtime import TrialRuntime, check_scalar

__all__ = ["MixedEpochsError", "PlainStepper", "StepRefusedError", "Stepper"]


class MixedEpochsError(Exception):
    """Trials at different epochs cannot be one array.

    Args:
        reason: Reason in words.
        spoilt: Whether a step with wrong results was taken before this was found; if not, nothing has changed.
    """

    def __init__(self, reason: object, spoilt: bool = False) -> None:
        super().__init__(str(reason))
        self.spoilt = spoilt


class StepRefusedError(Exception):
    """A step did something that this stepper does not support, and is left half done.

    The trials go back to their checkpoints, and train in plain PyTorch from there.

    Args:
        reason: Reason in words.
        trial: Number of the trial, if the reason is that it cannot draw its own random numbers even alone; else None.
    """

    def __init__(self, reason: str, trial: int | None = None) -> None:
        super().__init__(reason)
        self.trial = trial


class Stepper(ABC):
    """Trains trials at the same step of an epoch, batch by batch; their epochs may differ.

    `ArrayTrainer` calls `train_step` for each step of an epoch, then `validate`, until the trials of the array change.
    """

    runtimes: list[TrialRuntime]
    refusal = ""
    """Why trials of one structure cannot be an array; "" if they can, or if no step has shown it yet."""

    @property
    def finding(self) -> Profile | None:
        """The profile with new measurements of the structure; None if there are none."""
        return None

    @property
    def gain(self) -> float | None:
        """How many times as fast fused steps were as plain ones; None if not both were timed."""
        return None

    @property
    def settled(self) -> bool:
        """Whether the search for the fastest kind of step is over."""
        return True

    @abstractmethod
    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """Take one step of every trial.

        Args:
            batches: Batch of each trial; trials that share a batch have the same object.
            ticks: Steps of each trial so far, which determine its random numbers together with its seed.

        Returns:
            The losses, shape [B].

        Raises:
            MixedEpochsError: The trials are at different epochs, and cannot be one array.
            StepRefusedError: The stepper cannot train these trials.
        """

    @abstractmethod
    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Each trial's metrics and `valid_loss`, averaged over the samples.

        The random numbers of a trial are those of its seed and of ticks -1, -2, ...: the same at every epoch.

        Raises:
            StepRefusedError: The stepper cannot validate these trials.
        """


class PlainStepper(Stepper):
    """Trains trials one after another, each as a plain loop over its model and optimizer.

    Args:
        task: Task of the study.
        runtimes: Trials, of any structures.
        unkeyed: Numbers of trials that draw from generators seeded with the trial's seed, since their models cannot
            draw the numbers of an array (dropout under `torch.utils.checkpoint`).
        watched: Whether the draws of each run are checked; else only those of the first few.
        shared: Whether large frozen parameters stay in memory that other trials use. Requires that the trials did not
            change them as an array.
    """

    def __init__(
        self,
        task: Task,
        runtimes: Sequence[TrialRuntime],
        unkeyed: AbstractSet[int] = frozenset(),
        watched: bool = False,
        shared: bool = False,
    ) -> None:
        self.runtimes = list(runtimes)
        self._task = task
        self._trials = [
            _PlainTrial(task, runtime, runtime.trial.number not in unkeyed, watched, shared) for runtime in runtimes
        ]

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """Take one step of each trial."""
        members = len(self._trials)
        steps = enumerate(zip(self._trials, batches, ticks, strict=True))
        return torch.stack([trial.step(member_batch(batch, b, members), tick) for b, (trial, batch, tick) in steps])

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Validate all trials in one pass over the batches."""
        found = ValidationMetrics(self._task, self.runtimes)
        for runtime in self.runtimes:
            runtime.model.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches, start=1):
                trials = enumerate(self._trials)
                found.add_each(
                    [trial.measure(member_batch(batch, b, len(self._trials)), -number) for b, trial in trials],
                    size_of(batch),
                )
        for runtime in self.runtimes:
            runtime.model.train()
        return found.of_each()


class _PlainTrial:
    """One trial of a `PlainStepper`; see there for the arguments."""

    def __init__(self, task: Task, runtime: TrialRuntime, keyed: bool, watched: bool, shared: bool) -> None:
        self._task = task
        self._runtime = runtime
        self._watched = watched
        self._run = MemberRunner(runtime.trial.seed, runtime.device, watched) if keyed else None
        self._own_step = type(task).step is not Task.step
        self._config = runtime.trial.config if self._own_step and takes_config(task) else None
        self._update = None if self._own_step else UnfusedStep(runtime.optimizer)
        unshare_small(runtime.model)
        self._lent = [(each, each._version) for each in runtime.model.parameters() if is_shared(each)]
        if not shared:
            for parameter, _ in self._lent:
                unshare(parameter)
            self._lent.clear()

    def step(self, batch: Any, tick: int) -> Tensor:
        """Take one training step; returns the loss, detached.

        Raises:
            StepRefusedError: See `Stepper.train_step`.
        """
        if self._update is None:
            loss: Tensor = self._drawing(self._take_own_step, tick, batch)
            self._check_lent()
            return loss.detach()
        self._update.zero_grad()
        scale, taken = self._runtime.loss_scale, []
        for later, (part, weight) in enumerate(micro_batches(batch)):
            loss = weighted(self._drawing(self._loss, tick + later, part, reseeded=not later), weight)
            (loss if scale is None else scale.scaled(loss)).backward()  # type: ignore[no-untyped-call]
            taken.append(loss.detach())
        self._check_lent()
        if scale is not None:
            scale.unscale_(self._runtime.optimizer)
        if self._runtime.settings.max_norm is not None:
            nn.utils.clip_grad_norm_(self._runtime.model.parameters(), self._runtime.settings.max_norm)
        if scale is None or not scale.overflowed:
            self._update()
        if scale is not None:
            scale.update()
            self._runtime.optimizer._opt_called = True  # schedulers count a step that is left out, without a warning
        return total(taken)

    def measure(self, batch: Any, tick: int) -> tuple[dict[str, Any], Any]:
        """Loss with metrics, and outputs, of a validation batch.

        Raises:
            StepRefusedError: See `Stepper.validate`.
        """
        found: tuple[dict[str, Any], Any] = self._drawing(self._measured, tick, batch)
        return found

    def _drawing(self, fn: Any, tick: int, batch: Any, reseeded: bool = True) -> Any:
        """Call a function of the model and a batch with the random numbers of a tick.

        `reseeded` says whether to seed the generators that no member owns; they go on within a step, as in an array.
        """
        trial, model = self._runtime.trial, self._runtime.model
        if self._run is None:
            seed_all(step_seed(trial.seed, tick), self._runtime.device)
            return fn(model, batch)
        if reseeded:
            seed_all(step_seed(trial.data_seed, tick), self._runtime.device)
        try:
            return self._run(fn, tick, model, batch)
        except FusionError as error:
            raise StepRefusedError(str(error), trial.number if self._watched else None) from error

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(self._task, self._runtime.autocast, model, batch)

    def _measured(self, model: nn.Module, batch: Any) -> tuple[dict[str, Any], Any]:
        return measured(self._task, self._runtime.autocast, model, batch)

    def _take_own_step(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = call(self._task, "step", model, batch, self._runtime.optimizer, config=self._config)
        check_scalar("loss", loss)
        return loss

    def _check_lent(self) -> None:
        """Check that frozen parameters in shared memory have not been written to or unfrozen.

        Raises:
            StepRefusedError: They have been.
        """
        if any(each.requires_grad or each._version != version for each, version in self._lent):
            raise StepRefusedError("a frozen parameter in shared memory is changed or unfrozen")
