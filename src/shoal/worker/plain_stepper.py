"""Trains trials in plain PyTorch, one after another, where an array is impossible or slower."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.core.trial import step_seed
from shoal.fuse.frozen import lent, own_small, take_own
from shoal.fuse.generators import reseed
from shoal.fuse.optim.own_update import OwnUpdate
from shoal.fuse.per_member import MemberRunner, own_part
from shoal.task import Task, call, takes_config
from shoal.worker.metrics import MetricMeans, loss_of, measured, size_of
from shoal.worker.stepper import Stepper, StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime, check_scalar

__all__ = ["PlainStepper"]


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
        return torch.stack([trial.step(own_part(batch, b, members), tick) for b, (trial, batch, tick) in steps])

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Validate all trials in one pass over the batches."""
        means = MetricMeans(len(self._trials))
        for runtime in self.runtimes:
            runtime.model.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches, start=1):
                trials = enumerate(self._trials)
                found = [trial.measure(own_part(batch, b, len(self._trials)), -number) for b, trial in trials]
                means.add_each(found, size_of(batch))
        for runtime in self.runtimes:
            runtime.model.train()
        return means.of_each()


class _PlainTrial:
    """One trial of a `PlainStepper`; see there for the arguments."""

    def __init__(self, task: Task, runtime: TrialRuntime, keyed: bool, watched: bool, shared: bool) -> None:
        self._task = task
        self._runtime = runtime
        self._watched = watched
        self._run = MemberRunner(runtime.trial.seed, runtime.device, watched) if keyed else None
        self._own_step = type(task).step is not Task.step
        self._config = runtime.trial.config if self._own_step and takes_config(task) else None
        self._update = None if self._own_step else OwnUpdate(runtime.optimizer)
        own_small(runtime.model)
        self._lent = [(each, each._version) for each in runtime.model.parameters() if lent(each)]
        if not shared:
            for parameter, _ in self._lent:
                take_own(parameter)
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
        loss = self._drawing(self._loss, tick, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._check_lent()
        self._update()
        return loss.detach()

    def measure(self, batch: Any, tick: int) -> dict[str, Any]:
        """Loss and metrics of a validation batch.

        Raises:
            StepRefusedError: See `Stepper.validate`.
        """
        found: dict[str, Any] = self._drawing(self._measured, tick, batch)
        return found

    def _drawing(self, fn: Any, tick: int, batch: Any) -> Any:
        """Call a function of the model and a batch with the random numbers of a tick."""
        trial, model = self._runtime.trial, self._runtime.model
        if self._run is None:
            reseed(step_seed(trial.seed, tick), self._runtime.device)
            return fn(model, batch)
        reseed(step_seed(trial.data_seed, tick), self._runtime.device)
        try:
            return self._run(fn, tick, model, batch)
        except FusionError as error:
            raise StepRefusedError(str(error), trial.number if self._watched else None) from error

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(self._task, model, batch)

    def _measured(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return measured(self._task, model, batch)

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
            raise StepRefusedError("a frozen parameter, whose memory others use, is changed or unfrozen")
