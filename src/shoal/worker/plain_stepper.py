"""Trials in plain PyTorch, one after another: what is not faster as an array, or cannot be one."""

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
    """Trains runtimes one after another, each as a loop over its own model and optimizer does.

    Args:
        task: the user's.
        runtimes: any.
        unkeyed: numbers of trials for which generators are seeded with the trial's seed, for their models cannot draw
            the numbers that they draw in an array, such as with dropout under `torch.utils.checkpoint`.
        watched: whether each run is looked at for what it draws; else no more than the first few.
        shared: large frozen parameters that others use stay in that memory: as an array the runtimes have not changed
            them.
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
        """One step of each."""
        members = len(self._trials)
        steps = enumerate(zip(self._trials, batches, ticks, strict=True))
        return torch.stack([trial.step(own_part(batch, b, members), tick) for b, (trial, batch, tick) in steps])

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """One pass over the batches, each shown to every runtime."""
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
    """One of the runtimes; for the arguments see `PlainStepper`."""

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
        """One training step; returns the loss, part of no graph.

        Raises:
            StepRefusedError: see `Stepper.train_step`.
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
        """What a validation batch shows.

        Raises:
            StepRefusedError: see `Stepper.validate`.
        """
        found: dict[str, Any] = self._drawing(self._measured, tick, batch)
        return found

    def _drawing(self, fn: Any, tick: int, batch: Any) -> Any:
        """What a function of the model and a batch returns, with the random numbers of a tick."""
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
        """Refuse to go on where frozen parameters in memory that others use have been written to, or are to be trained.

        Raises:
            StepRefusedError: they are.
        """
        if any(each.requires_grad or each._version != version for each, version in self._lent):
            raise StepRefusedError("a frozen parameter, whose memory others use, is changed or unfrozen")
