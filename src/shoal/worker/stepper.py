"""Training steps and validation of several learners: fused where that can be, else one after another."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.cost.demand import Profile
from shoal.errors import FusionError, TaskError
from shoal.fuse.batch import stack
from shoal.fuse.frozen import lent, take_own
from shoal.fuse.generators import OtherGenerators, reseed
from shoal.fuse.held import Held
from shoal.fuse.making import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.task import Task
from shoal.trial import step_seed
from shoal.worker.learner import Learner, check_scalar, optimizers_in
from shoal.worker.own_step import OwnStep
from shoal.worker.pace import Pace
from shoal.worker.remember import remembered
from shoal.worker.snapshot import Snapshot

__all__ = ["ApartStepper", "FusedStepper", "MixedEpochsError", "SerialStepper", "Stepper", "make_stepper"]

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


class Stepper(ABC):
    """Trains learners that are at the same step of an epoch, batch by batch; the epochs may be different ones."""

    learners: list[Learner]

    watched = True
    """Whether each step looks at the generators of random numbers; who turns that off sees to it himself."""

    @property
    def watchable(self) -> bool:
        """Whether who looks at the generators from outside sees all that is drawn from them."""
        return False

    def held(self) -> Held:
        """What the first model holds beside its state; the others hold alike."""
        return Held([self.learners[0].model])

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
        """

    @abstractmethod
    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Each learner's metrics and `valid_loss`, averaged over the samples.

        Random numbers of a learner are those of its seed and of ticks -1, -2, ...: the same at every epoch.
        """


class FusedStepper(Stepper):
    """Learners of one structure as one array."""

    def __init__(self, task: Task, learners: Sequence[Learner], profile: Profile | None = None, steps: int = 0) -> None:
        self._task = task
        self.learners = list(learners)
        self._array = fuse([x.model for x in learners], [x.trial.seed for x in learners])
        self._steps: Pace | OwnStep
        if type(task).step is not Task.step:
            self._steps = OwnStep(self._array, learners, task.step)
        else:
            optimizer = fuse_optimizers([x.optimizer for x in learners], self._array)
            self._steps = Pace(self._array, optimizer, self._loss, profile, steps)
        self._begun = False
        self._apart: Stepper | None = None

    @property
    def watchable(self) -> bool:
        """Unless the generators are brought back after a member, or a part of it, has drawn."""
        return self._apart is None and not self._array.partial and not self._array.took_back

    def held(self) -> Held:
        """That, and what runs for all at once."""
        return self._array.held()

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
        self._array.ticks = tuple(ticks)
        self._array.watched = self.watched
        if not _epochs_differ(self.learners):
            return self._step(batches[0], batches, ticks)
        try:
            batch = stack(batches)
        except FusionError as reason:
            raise MixedEpochsError(reason) from reason
        others = OtherGenerators() if self.watched else None
        losses = self._step(batch, batches, ticks)
        if others is not None and (others.moved() or self._array.took_back):
            why = "random numbers of Python's or NumPy's are drawn, of which each epoch has its own"
            raise MixedEpochsError(why, spoilt=True)
        return losses

    def _step(self, batch: Any, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step, on the members' batches as one; the first one shows whether they can run as an array."""
        if self._begun:
            return self._steps.step(batch)
        self._begun = True
        before = Snapshot(self._array, [one for x in self.learners for one in optimizers_in(x.optimizer)])
        try:
            return self._steps.step(batch)
        except FusionError as error:
            before.restore()
            if _epochs_differ(self.learners):
                raise MixedEpochsError(error) from error
            self._apart = _apart(self._task, self.learners, error)
        return self._apart.train_step(batches, ticks)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self._task.loss(model, batch)
        check_scalar("loss", loss)
        return loss

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """All members on one pass over the batches."""
        if self._apart is not None:
            return self._apart.validate(batches)
        totals: dict[str, Tensor] = {}
        samples = 0
        self._array.eval()
        self._array.watched = True
        with torch.no_grad():
            for number, batch in enumerate(batches, start=1):
                size = _size(batch)
                self._array.ticks = (-number,) * len(self.learners)
                for name, value in self._array.map(self._measure, batch).items():
                    check_scalar(name, value, axes=1)
                    weighted = value.double() * size
                    totals[name] = totals[name] + weighted if name in totals else weighted
                samples += size
        self._array.train()
        columns = {name: (total / samples).tolist() for name, total in totals.items()}
        return [{name: values[b] for name, values in columns.items()} for b in range(len(self.learners))]

    def _measure(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        with remembered(model):
            return _with_loss(self._loss(model, batch), self._task.metrics(model, batch))


class SerialStepper(Stepper):
    """One learner after another in plain PyTorch, by the task's own `step`."""

    def __init__(self, task: Task, learners: Sequence[Learner]) -> None:
        self._task = task
        self._device = learners[0].device
        self.learners = list(learners)
        for learner in learners:  # a frozen parameter that others use may come to be trained here
            for parameter in filter(lent, learner.model.parameters()):
                take_own(parameter)

    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step of each."""
        losses = []
        for learner, batch, tick in zip(self.learners, batches, ticks, strict=True):
            reseed(step_seed(learner.trial.seed, tick), self._device)
            loss = self._task.step(learner.model, _own(batch, self.learners), learner.optimizer)
            check_scalar("loss", loss)
            losses.append(loss.detach())
        return torch.stack(losses)

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """One pass over the batches, each shown to every learner."""
        totals: list[dict[str, float]] = [{} for _ in self.learners]
        samples = 0
        for learner in self.learners:
            learner.model.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches, start=1):
                size = _size(batch)
                for learner, total in zip(self.learners, totals, strict=True):
                    reseed(step_seed(learner.trial.seed, -number), self._device)
                    with remembered(learner.model):
                        mine = _own(batch, self.learners)
                        values = _with_loss(
                            self._task.loss(learner.model, mine), self._task.metrics(learner.model, mine)
                        )
                    for name, value in values.items():
                        check_scalar(name, torch.as_tensor(value))
                        total[name] = total.get(name, 0.0) + float(value) * size
                samples += size
        for learner in self.learners:
            learner.model.train()
        return [{name: value / samples for name, value in total.items()} for total in totals]


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
        others = OtherGenerators()
        for stepper, batch, tick in zip(self._steppers, batches, ticks, strict=True):
            others.restore()
            losses.append(stepper.train_step([_own(batch, self._steppers)], [tick]))
        return torch.cat(losses)

    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """One pass over the batches by each."""
        kept = list(batches)
        copies = ([_own(batch, self._steppers) for batch in kept] for _ in self._steppers)
        return [m for stepper, mine in zip(self._steppers, copies, strict=True) for m in stepper.validate(mine)]


def make_stepper(task: Task, learners: Sequence[Learner], profile: Profile | None = None, steps: int = 0) -> Stepper:
    """The fastest stepper that is right for these learners.

    What a learner gets depends on it alone, not on its company: so do its random numbers.

    Args:
        task: the user's.
        learners: at the same step of an epoch.
        profile: what is known of their structure.
        steps: that they still have before them; 0 rules compiling out.

    Raises:
        MixedEpochsError: they are at different epochs.
    """
    try:
        return FusedStepper(task, learners, profile, steps)
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


def _with_loss(loss: Tensor, metrics: Mapping[str, Any]) -> dict[str, Any]:
    if "valid_loss" in metrics:
        raise TaskError("the task's `metrics` must not return 'valid_loss': that is its `loss`; choose another name")
    return {"valid_loss": loss, **metrics}


def _own(batch: Any, users: Sequence[Any]) -> Any:
    """A batch for one of its users, who may change it in place."""
    return batch if len(users) == 1 else pytree.tree_map_only(Tensor, torch.clone, batch)


def _size(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise TaskError(f"a batch must hold a tensor whose first axis counts samples, got {type(batch).__name__}")
