"""Training steps and validation of several learners: fused where that can be, else one after another."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.demand import Profile
from shoal.core.errors import FusionError, TaskError
from shoal.core.objective import metric_fault
from shoal.core.space import is_number
from shoal.core.trial import step_seed
from shoal.fuse.batch import stack
from shoal.fuse.frozen import lent, take_own
from shoal.fuse.generators import Drawn, OtherGenerators, reseed, seeded
from shoal.fuse.making import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.task import Task, call, takes_config
from shoal.worker.learner import Learner, check_scalar, optimizers_in
from shoal.worker.own_step import OwnStep, take_step
from shoal.worker.pace import Pace
from shoal.worker.remember import remembered
from shoal.worker.snapshot import Snapshot

__all__ = [
    "ApartStepper",
    "FusedStepper",
    "MixedEpochsError",
    "SerialStepper",
    "StepRefusedError",
    "Stepper",
    "make_stepper",
]

_log = logging.getLogger("shoal.worker")


class MixedEpochsError(Exception):
    """Learners at different epochs cannot be one array.

    Args:
        reason: why.
        spoilt: whether a step was done before that was known, with wrong numbers; else nothing is changed.
    """

    def __init__(self, reason: object, spoilt: bool = False) -> None:
        super().__init__(str(reason))
        self.spoilt = spoilt


class StepRefusedError(Exception):
    """A step of an array, but for its first, did what its members have to do by themselves, and is left half done.

    The learners go back to their checkpoints, and train by themselves from there.
    """


class Stepper(ABC):
    """Trains learners that are at the same step of an epoch, batch by batch; the epochs may be different ones."""

    learners: list[Learner]

    @property
    def finding(self) -> Profile | None:
        """What is newly known of the structure's cost."""
        return None

    @property
    def gain(self) -> float | None:
        """How many times as fast steps of all at once were as of one after another; None if not both were timed."""
        return None

    @property
    def settled(self) -> bool:
        """Whether steps are taken in the way that was found the fastest."""
        return True

    @abstractmethod
    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step of every learner.

        Args:
            batches: of each learner; those that are shared are one object.
            ticks: steps each learner has done since it began; with its seed that determines its random numbers.

        Returns:
            The losses, shape [B].

        Raises:
            MixedEpochsError: the learners are at different epochs.
            StepRefusedError: they cannot go on as an array.
        """

    @abstractmethod
    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Each learner's metrics and `valid_loss`, averaged over the samples.

        Random numbers of a learner are those of its seed and of ticks -1, -2, ...: the same at every epoch.

        Raises:
            StepRefusedError: they cannot go on as an array.
        """


class FusedStepper(Stepper):
    """Learners of one structure as one array.

    The first step shows whether they can be one; else it is taken back, and each goes on by itself.

    Args:
        task: the user's.
        learners: of one structure.
        profile: what is known of it.
        steps: that they still have before them.
        watched: a lone learner is looked at in all steps for what it draws.
    """

    def __init__(
        self,
        task: Task,
        learners: Sequence[Learner],
        profile: Profile | None = None,
        steps: int = 0,
        watched: bool = False,
    ) -> None:
        self._task = task
        self.learners = list(learners)
        self._array = fuse([x.model for x in learners], [x.trial.seed for x in learners])
        self._array.watched = watched
        self._steps: Pace | OwnStep
        if type(task).step is not Task.step:
            self._steps = OwnStep(self._array, learners, task)
        else:
            optimizer = fuse_optimizers([x.optimizer for x in learners], self._array)
            self._steps = Pace(self._array, optimizer, self._loss, profile, steps)
        self._begun = False
        self._apart: Stepper | None = None

    @property
    def finding(self) -> Profile | None:
        """What the first steps showed."""
        return self._steps.finding if isinstance(self._steps, Pace) else None

    @property
    def gain(self) -> float | None:
        """As far as the first steps have shown."""
        return self._steps.gain if isinstance(self._steps, Pace) else None

    @property
    def settled(self) -> bool:
        """Once the first steps have been taken in several ways."""
        if self._apart is not None:
            return self._apart.settled
        return self._steps.settled

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step of the array; or of the members apart, if the first one shows that they cannot run as an array."""
        if self._apart is not None:
            return self._apart.train_step(batches, ticks)
        mixed = _epochs_differ(self.learners)
        try:
            batch = stack(batches) if mixed else batches[0]
        except FusionError as reason:
            raise MixedEpochsError(reason) from reason
        self._array.ticks = tuple(ticks)
        before = None if self._begun else self._snapshot()
        self._begun = True
        try:
            with self._refusing_draws(ticks[0], mixed):
                return self._steps.step(batch)
        except FusionError as error:
            if before is not None:
                before.restore()
            if mixed:
                raise MixedEpochsError(error, spoilt=before is None) from error
            if before is None:
                raise StepRefusedError(str(error)) from error
            self._apart = _apart(self._task, self.learners, error)
        return self._apart.train_step(batches, ticks)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._array, [one for x in self.learners for one in optimizers_in(x.optimizer)])

    @contextmanager
    def _refusing_draws(self, tick: int, mixed: bool = False) -> Iterator[None]:
        """Within, the generators that know no members are seeded for a step.

        Raises:
            FusionError: all members at once have drawn numbers of which each has its own.
        """
        lead = self.learners[0]
        with seeded(step_seed(lead.trial.data_seed, tick), lead.device):
            torchs = Drawn(lead.device) if len(self.learners) > 1 else None
            others = OtherGenerators() if torchs is not None and (mixed or self._array.partial) else None
            yield
            if others is not None and others.moved():
                owner = "each epoch" if mixed else "each member"
                raise FusionError(f"random numbers of Python's or NumPy's are drawn, of which {owner} has its own")
            if torchs is not None and torchs():
                raise FusionError("random numbers are drawn from torch's default generator past torch's own functions")

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        return _loss_of(self._task, model, batch)

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """All members on one pass over the batches."""
        if self._apart is not None:
            return self._apart.validate(batches)
        means = _MetricMeans(len(self.learners))
        self._array.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches, start=1):
                size = _size(batch)
                self._array.ticks = (-number,) * len(self.learners)
                try:
                    with self._refusing_draws(-number):
                        found = self._array.map(self._measure, batch)
                except FusionError as error:
                    raise StepRefusedError(str(error)) from error
                if isinstance(found, list):
                    means.add_each([alone.values for alone in found], size)
                else:
                    means.add(found, size)
        self._array.train()
        return means.of_each()

    def _measure(self, model: nn.Module, batch: Any) -> Any:
        values = _measured(self._task, model, batch)
        return _Alone(values) if any(model is member for member in self._array.members) else values


class SerialStepper(Stepper):
    """One learner after another in plain PyTorch, by the task's own `step`."""

    def __init__(self, task: Task, learners: Sequence[Learner]) -> None:
        self._task = task
        self._device = learners[0].device
        self.learners = list(learners)
        self._with_config = type(task).step is not Task.step and takes_config(task)
        for learner in learners:  # a frozen parameter that others use may come to be trained here
            for parameter in filter(lent, learner.model.parameters()):
                take_own(parameter)

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step of each."""
        losses = []
        for learner, batch, tick in zip(self.learners, batches, ticks, strict=True):
            reseed(step_seed(learner.trial.seed, tick), self._device)
            losses.append(take_step(self._task, learner, _own(batch, self.learners), self._with_config))
        return torch.stack(losses)

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """One pass over the batches, each shown to every learner."""
        means = _MetricMeans(len(self.learners))
        for learner in self.learners:
            learner.model.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches, start=1):
                found = []
                for learner in self.learners:
                    reseed(step_seed(learner.trial.seed, -number), self._device)
                    found.append(_measured(self._task, learner.model, _own(batch, self.learners)))
                means.add_each(found, _size(batch))
        for learner in self.learners:
            learner.model.train()
        return means.of_each()


class ApartStepper(Stepper):
    """Learners that cannot be one array, each trained as it is when it is alone."""

    def __init__(self, steppers: Sequence[Stepper]) -> None:
        self._steppers = list(steppers)
        self.learners = [learner for stepper in steppers for learner in stepper.learners]

    @property
    def settled(self) -> bool:
        """Once all of them have."""
        return all(stepper.settled for stepper in self._steppers)

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step of each."""
        losses = []
        for stepper, batch, tick in zip(self._steppers, batches, ticks, strict=True):
            losses.append(stepper.train_step([_own(batch, self._steppers)], [tick]))
        return torch.cat(losses)

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """One pass over the batches by each."""
        kept = list(batches)
        copies = ([_own(batch, self._steppers) for batch in kept] for _ in self._steppers)
        return [m for stepper, mine in zip(self._steppers, copies, strict=True) for m in stepper.validate(mine)]


def make_stepper(
    task: Task, learners: Sequence[Learner], profile: Profile | None = None, steps: int = 0, refusals: int = 0
) -> Stepper:
    """The fastest stepper that is right for these learners.

    What a learner gets depends on it alone, not on its company: so do its random numbers.

    Args:
        task: the user's.
        learners: at the same step of an epoch.
        profile: what is known of their structure.
        steps: that they still have before them; 0 rules compiling out.
        refusals: steps in which learners like these were refused. After the first of them each is an array of its own,
            after the second each is trained in plain PyTorch.

    Raises:
        MixedEpochsError: they are at different epochs.
    """
    if len(learners) > 1 and refusals:
        if _epochs_differ(learners):
            raise MixedEpochsError("they are trained by themselves")
        return ApartStepper([make_stepper(task, [learner], refusals=refusals) for learner in learners])
    if refusals > 1:
        return SerialStepper(task, learners)
    try:
        return FusedStepper(task, learners, profile, steps, watched=refusals > 0)
    except FusionError as reason:
        if _epochs_differ(learners):
            raise MixedEpochsError(reason) from reason
        return _apart(task, learners, reason)


def _apart(task: Task, learners: Sequence[Learner], reason: FusionError) -> Stepper:
    """For learners that are no array: an array each, or plain PyTorch for one that is not even that."""
    _log.warning("trials %s cannot be one array: %s", [x.trial.number for x in learners], reason)
    if len(learners) == 1:
        return SerialStepper(task, learners)
    return ApartStepper([make_stepper(task, [learner]) for learner in learners])


def _epochs_differ(learners: Sequence[Learner]) -> bool:
    return len({learner.epoch for learner in learners}) > 1


@dataclass(frozen=True)
class _Alone:
    """What one member shows of a batch; no tree to torch, so members need not show the same."""

    values: dict[str, Any]


class _MetricMeans:
    """The means of metrics of several learners, each over the samples of the batches that have it.

    Args:
        members: how many.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._totals: dict[str, Tensor] = {}
        self._samples: dict[str, list[int]] = {}

    def add(self, values: Mapping[str, Tensor], size: int) -> None:
        """Count a batch of so many samples, of which all learners show the same metrics, [B] each."""
        for name, column in values.items():
            check_scalar(name, column, axes=1)
            self._count(name, column, [size] * self._members)

    def add_each(self, found: Sequence[Mapping[str, Any]], size: int) -> None:
        """Count a batch of so many samples, of which each learner shows metrics of its own."""
        for name in dict.fromkeys(name for values in found for name in values):
            column = [torch.as_tensor(values.get(name, 0.0)) for values in found]
            for value in column:
                check_scalar(name, value)
            place = next(value.device for value, values in zip(column, found, strict=True) if name in values)
            stacked = torch.stack([value.to(place, torch.float64) for value in column])
            self._count(name, stacked, [size if name in values else 0 for values in found])

    def _count(self, name: str, column: Tensor, samples: list[int]) -> None:
        weighted = column.double() * max(samples)
        self._totals[name] = self._totals[name] + weighted if name in self._totals else weighted
        before = self._samples.get(name, [0] * self._members)
        self._samples[name] = [had + more for had, more in zip(before, samples, strict=True)]

    def of_each(self) -> list[dict[str, float]]:
        """The means, of each learner those that it has."""
        columns = {name: (total.tolist(), self._samples[name]) for name, total in self._totals.items()}
        return [
            {name: totals[b] / samples[b] for name, (totals, samples) in columns.items() if samples[b]}
            for b in range(self._members)
        ]


def _loss_of(task: Task, model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = call(task, "loss", model, batch)
    check_scalar("loss", loss)
    return loss


def _measured(task: Task, model: nn.Module, batch: Any) -> dict[str, Any]:
    """What a validation batch shows of a model, or of an array of them.

    Raises:
        TaskError: the task's `metrics` returns no mapping of names to numbers, or has the name of the loss.
    """
    with remembered(model):
        loss = _loss_of(task, model, batch)
        metrics = call(task, "metrics", model, batch)
    if not isinstance(metrics, Mapping):
        raise TaskError(
            "the task's `metrics` must return a mapping of names to scalars, such as {'accuracy': accuracy}, got "
            f"{type(metrics).__name__}; return {{}} where there are none"
        )
    for name, value in metrics.items():
        if not isinstance(value, (Tensor, int, float, np.number, np.bool_)):
            raise TaskError(f"the task's metric {name!r} must be a scalar tensor or a number, got {value!r}")
        if is_number(value) and (fault := metric_fault(str(name), value)):
            raise TaskError(fault)
    if "valid_loss" in metrics:
        raise TaskError("the task's `metrics` must not return 'valid_loss': that is its `loss`; choose another name")
    return {"valid_loss": loss, **{name: _whole(value) for name, value in metrics.items()}}


def _whole(value: Any) -> Any:
    """A number of Python's with all its digits and of any size, which torch would keep with half of them, or not."""
    return torch.tensor(float(value), dtype=torch.float64) if is_number(value) else value


def _own(batch: Any, users: Sequence[Any]) -> Any:
    """A batch for one of its users, who may change it in place."""
    return batch if len(users) == 1 else pytree.tree_map_only(Tensor, torch.clone, batch)


def _size(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise TaskError(f"a batch must hold a tensor whose first axis counts samples, got {type(batch).__name__}")
