"""Assigns batches to the training steps of a trial, and training steps to epochs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.fuse.micro_batches import MicroBatches
from shoal.task import Task
from shoal.train.data.batches import Batches
from shoal.train.data.loader import augmentation_seed
from shoal.train.step_settings import StepSettings

__all__ = ["StepPlan"]


@dataclass(frozen=True)
class StepPlan:
    """Divides the passes over a training set into training steps, and the steps into epochs.

    A step takes `settings.accumulate` batches; the last step of a pass may take fewer. An epoch is one pass, or
    `settings.steps_per_epoch` steps, and may then end in the middle of a pass. An iterable training set without a
    length is a single endless pass.
    """

    settings: StepSettings
    train: Batches
    weigh: Callable[[Sequence[Any], int], Sequence[tuple[Any, float]]]

    @classmethod
    def of(cls, task: Task, config: Config, train: Batches, valid: Batches) -> "StepPlan":
        """Return the plan of a config."""
        settings = StepSettings.of(task, config, train.batch_size, valid.batch_size)
        if train.endless and settings.steps_per_epoch is None:
            raise TaskError(
                "the training set is iterable and has no length, so the end of an epoch is unknown; return the "
                "training steps of an epoch from the task's `steps_per_epoch`, or give the data set a `__len__`"
            )
        return cls(settings, train, task._weigh)

    @cached_property
    def pass_batches(self) -> int:
        """Batches of one pass over the training set."""
        return self.train.steps(self.settings.batch_size)

    @cached_property
    def pass_steps(self) -> int:
        """Training steps of one pass."""
        return math.ceil(self.pass_batches / self.settings.accumulate)

    @cached_property
    def epoch_steps(self) -> int:
        """Training steps of an epoch."""
        return self.settings.steps_per_epoch or self.pass_steps

    def locate(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the number of the pass in which a step of an epoch begins, and of its first batch in this pass."""
        number, within = divmod(epoch * self.epoch_steps + step, self.pass_steps)
        return number, within * self.settings.accumulate

    def tick(self, epoch: int, step: int) -> int:
        """Return the number of batches since the trial's start before a step, which determines its random numbers."""
        number, batch = self.locate(epoch, step)
        return number * self.pass_batches + batch

    def samples(self, epoch: int, step: int) -> int:
        """Return the number of samples of a step."""
        first = self.locate(epoch, step)[1]
        batches = min(self.settings.accumulate, self.pass_batches - first)
        return min(batches * self.settings.batch_size, self.train.samples - first * self.settings.batch_size)

    def step_batches(self, epoch: int, step: int, data_seed: int) -> Iterator[Any]:
        """Return the batches, or `MicroBatches`, of the steps of an epoch, starting at `step`."""
        return islice(self._endless_batches(epoch, step, data_seed), self.epoch_steps - step)

    def _endless_batches(self, epoch: int, step: int, data_seed: int) -> Iterator[Any]:
        number, first = self.locate(epoch, step)
        while True:
            order = self.train.order(data_seed, number)
            batches = self.train.iterate(self.settings.batch_size, order, first, augmentation_seed(data_seed, number))
            yield from batches if self.settings.accumulate == 1 else self._accumulated(batches)
            number, first = number + 1, 0

    def _accumulated(self, batches: Iterator[Any]) -> Iterator[MicroBatches]:
        while step_batches := list(islice(batches, self.settings.accumulate)):
            weighed = self.weigh(step_batches, self.settings.accumulate)
            yield MicroBatches(tuple(batch for batch, _ in weighed), tuple(weight for _, weight in weighed))
