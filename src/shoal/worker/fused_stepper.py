"""Trials of one structure as an array, where that can be and is faster; else in plain PyTorch."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.core.trial import step_seed
from shoal.fuse.api import fuse, stack
from shoal.fuse.frozen import lent, own_small
from shoal.fuse.generators import Drawn, OtherGenerators, seeded
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.table import steps_as_made
from shoal.fuse.transaction import Transaction
from shoal.task import Task
from shoal.worker.adaptive_step import AdaptiveStep
from shoal.worker.custom_step import CustomStep
from shoal.worker.metrics import MetricMeans, loss_of, measured, size_of
from shoal.worker.plain_stepper import PlainStepper
from shoal.worker.stepper import MixedEpochsError, Stepper, StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime, optimizers_in

__all__ = ["FusedStepper", "make_stepper"]

_log = logging.getLogger("shoal.worker")


class FusedStepper(Stepper):
    """Runtimes of one structure as one array, until plain steps are found to be faster.

    The first step shows whether they can be one; else it is taken back, and they train in plain PyTorch.

    Args:
        task: the user's.
        runtimes: of one structure.
        profile: what is known of it.
        steps: that they still have before them.
        shown: others of their structure have taken steps as an array, so the first step is not taken back.

    Raises:
        FusionError: they cannot be an array.
    """

    def __init__(
        self,
        task: Task,
        runtimes: Sequence[TrialRuntime],
        profile: Profile | None = None,
        steps: int = 0,
        shown: bool = False,
    ) -> None:
        self._task = task
        self.runtimes = list(runtimes)
        for runtime in runtimes:  # who was in an array with others shares memory with them
            own_small(runtime.model)
        self._array = fuse([x.model for x in runtimes], [x.trial.seed for x in runtimes], strict=False)
        self._one_by_one = self._array.partial or any(map(_steps_its_own_way, runtimes))
        self._steps: AdaptiveStep | CustomStep
        if type(task).step is not Task.step:
            self._steps = CustomStep(self._array, runtimes, task)
        else:
            optimizer = fuse_optimizers([x.optimizer for x in runtimes], self._array)
            loss = update_wrapper(partial(loss_of, task), task.loss)
            self._steps = AdaptiveStep(self._array, optimizer, loss, profile, steps)
        self._measure = update_wrapper(partial(_measure, task, self._array.members), task.metrics)
        self._begun = shown
        self._plain: PlainStepper | None = None
        self._finding: Profile | None = None
        self._gain: float | None = None

    @property
    def finding(self) -> Profile | None:
        """What the first steps showed."""
        if self._plain is None and isinstance(self._steps, AdaptiveStep):
            return self._steps.finding
        return self._finding

    @property
    def gain(self) -> float | None:
        """As far as the first steps have shown."""
        if self._plain is None and isinstance(self._steps, AdaptiveStep):
            return self._steps.gain
        return self._gain

    @property
    def settled(self) -> bool:
        """Once the first steps have been taken in several ways."""
        return self._plain is not None or not isinstance(self._steps, AdaptiveStep) or self._steps.settled

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step of the array; or in plain PyTorch, once that is found to be faster or the first step is refused."""
        if self._plain is not None:
            return self._plain.train_step(batches, ticks)
        mixed = _epochs_differ(self.runtimes)
        try:
            batch = stack(batches) if mixed else batches[0]
        except FusionError as reason:
            raise MixedEpochsError(reason) from reason
        self._array.ticks = tuple(ticks)
        before = None if self._begun else self._transaction()
        self._begun = True
        try:
            with self._refusing_draws(ticks, mixed):
                losses = self._steps.step(batch)
        except FusionError as error:
            if before is not None:
                before.restore()
            if mixed:
                raise MixedEpochsError(error, spoilt=before is None) from error
            if before is None:
                raise StepRefusedError(str(error)) from error
            self.refusal = _say(self.runtimes, error)
            return self._go_on_plainly(shared=False).train_step(batches, ticks)
        if isinstance(self._steps, AdaptiveStep) and self._steps.plain:
            self._go_on_plainly(shared=True)
        return losses

    def _go_on_plainly(self, shared: bool) -> PlainStepper:
        """Let go of the array, with all that it keeps; `shared`: see `PlainStepper`."""
        self._finding, self._gain = self.finding, self.gain
        self._plain = PlainStepper(self._task, self.runtimes, shared=shared)
        for parameter in self._array.parameters():
            parameter.grad = None
        del self._array, self._steps, self._measure
        return self._plain

    def _transaction(self) -> Transaction:
        """All that a step may change; what lies in one memory for several members once."""
        models = [runtime.model for runtime in self.runtimes]
        optimizers = [one for runtime in self.runtimes for one in optimizers_in(runtime.optimizer)]
        tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
        once = {each.data_ptr() if lent(each) else id(each): each for each in tensors}
        return Transaction(models, tensors=once.values(), owners=optimizers)

    @contextmanager
    def _refusing_draws(self, ticks: Sequence[int], mixed: bool = False) -> Iterator[None]:
        """Within, the generators that know no members are seeded for a step.

        Raises:
            FusionError: all members at once have drawn numbers of which each has its own.
        """
        lead = self.runtimes[0]
        with seeded([step_seed(lead.trial.data_seed, tick) for tick in ticks], lead.device):
            torchs = Drawn(lead.device) if len(self.runtimes) > 1 else None
            others = OtherGenerators() if torchs is not None and (mixed or self._one_by_one) else None
            yield
            if others is not None and others.moved():
                owner = "each epoch" if mixed else "each member"
                raise FusionError(f"random numbers of Python's or NumPy's are drawn, of which {owner} has its own")
            if torchs is not None and torchs():
                raise FusionError("random numbers are drawn from torch's default generator past torch's own functions")

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """All members on one pass over the batches."""
        if self._plain is not None:
            return self._plain.validate(batches)
        means = MetricMeans(len(self.runtimes))
        self._array.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches, start=1):
                size = size_of(batch)
                self._array.ticks = ticks = (-number,) * len(self.runtimes)
                try:
                    with self._refusing_draws(ticks):
                        found = self._array.map(self._measure, batch)
                except FusionError as error:
                    raise StepRefusedError(str(error)) from error
                if isinstance(found, list):
                    means.add_each([alone.values for alone in found], size)
                else:
                    means.add(found, size)
        self._array.train()
        return means.of_each()


def make_stepper(
    task: Task,
    runtimes: Sequence[TrialRuntime],
    profile: Profile | None = None,
    steps: int = 0,
    shown: bool = False,
    refused: bool = False,
    unkeyed: AbstractSet[int] = frozenset(),
) -> Stepper:
    """The fastest stepper that is right for these runtimes.

    What a runtime gets depends on it alone, not on its company: so do its random numbers.

    Args:
        task: the user's.
        runtimes: at the same step of an epoch.
        profile: what is known of their structure.
        steps: that they still have before them; 0 rules compiling out.
        shown: see `FusedStepper`.
        refused: a step of runtimes like these was refused, so they are trained in plain PyTorch.
        unkeyed: see `PlainStepper`.

    Raises:
        MixedEpochsError: they are at different epochs, and cannot be an array.
    """
    if refused:
        return PlainStepper(task, runtimes, unkeyed, watched=True)
    if len(runtimes) == 1 and type(task).step is not Task.step:
        return PlainStepper(task, runtimes)
    try:
        return FusedStepper(task, runtimes, profile, steps, shown)
    except FusionError as reason:
        if _epochs_differ(runtimes):
            raise MixedEpochsError(reason) from reason
        stepper = PlainStepper(task, runtimes)
        stepper.refusal = _say(runtimes, reason)
        return stepper


def _say(runtimes: Sequence[TrialRuntime], reason: FusionError) -> str:
    """Log why runtimes are no array; returns the reason."""
    trials = [runtime.trial.number for runtime in runtimes]
    if len(trials) > 1:
        _log.warning("trials %s cannot be one array, and train in plain PyTorch: %s", trials, reason)
    else:
        _log.info("trial %s cannot be captured or compiled: %s", trials[0], reason)
    return str(reason)


def _epochs_differ(runtimes: Sequence[TrialRuntime]) -> bool:
    return len({runtime.epoch for runtime in runtimes}) > 1


def _steps_its_own_way(runtime: TrialRuntime) -> bool:
    """Whether a class or a hook of the user's is part of an optimizer's step, which may draw random numbers."""
    optimizers = optimizers_in(runtime.optimizer)
    return any(not type(one).__module__.startswith("torch.optim.") or not steps_as_made(one) for one in optimizers)


def _measure(task: Task, members: Sequence[nn.Module], model: nn.Module, batch: Any) -> Any:
    """What a batch shows of the model of all, or of one of the members."""
    values = measured(task, model, batch)
    return _Alone(values) if any(model is member for member in members) else values


@dataclass(frozen=True)
class _Alone:
    """What one member shows of a batch; no tree to torch, so members need not show the same."""

    values: dict[str, Any]
