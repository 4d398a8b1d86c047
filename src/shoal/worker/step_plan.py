"""Which batches each training step of a trial takes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.data.batches import Batches
from shoal.data.loader import noise_seed
from shoal.fuse.micro_batches import MicroBatches
from shoal.task import Task
from shoal.worker.step_settings import StepSettings

__all__ = ["StepPlan"]


@dataclass(frozen=True)
class StepPlan:
    """Cuts the passes over a training set into training steps, and these into epochs.

    A step takes `settings.accumulate` batches; the last step of a pass may take fewer. An epoch is one pass, or
    `settings.steps_per_epoch` steps: then passes follow one another, and an epoch may end in the middle of one. An
    iterable training set without a length is a single pass without an end.

    Args:
        settings: Settings of the config.
        train: Training set.
        weigh: `Task._weigh` of the task.
    """

    settings: StepSettings
    train: Batches
    weigh: Callable[[Sequence[Any], int], Sequence[tuple[Any, float]]]

    @classmethod
    def of(cls, task: Task, config: Config, train: Batches, valid: Batches) -> "StepPlan":
        """The plan of a config.

        Raises:
            TaskError: A method of the task returns a wrong value, or the end of an epoch is unknown.
        """
        settings = StepSettings.of(task, config, train.batch_size, valid.batch_size)
        if train.endless and settings.steps_per_epoch is None:
            raise TaskError(
                "the training set is iterable and has no length, so the end of an epoch is unknown; return the "
                "training steps of an epoch from the task's `steps_per_epoch`, or give the data set a `__len__`"
            )
        return cls(settings, train, task._weigh)

    @property
    def pass_batches(self) -> int:
        """Batches of one pass over the training set."""
        return self.train.steps(self.settings.batch_size)

    @property
    def pass_steps(self) -> int:
        """Training steps of one pass."""
        return math.ceil(self.pass_batches / self.settings.accumulate)

    @property
    def epoch_steps(self) -> int:
        """Training steps of an epoch."""
        return self.settings.steps_per_epoch or self.pass_steps

    def place(self, epoch: int, step: int) -> tuple[int, int]:
        """The pass of a step of an epoch, and the number of its first batch in that pass."""
        number, within = divmod(epoch * self.epoch_steps + step, self.pass_steps)
        return number, within * self.settings.accumulate

    def tick(self, epoch: int, step: int) -> int:
        """The number of batches before a step since the trial's start, which determines the step's random numbers."""
        number, batch = self.place(epoch, step)
        return number * self.pass_batches + batch

    def samples(self, epoch: int, step: int) -> int:
        """Samples of a step."""
        first = self.place(epoch, step)[1]
        batches = min(self.settings.accumulate, self.pass_batches - first)
        return min(batches * self.settings.batch_size, self.train.samples - first * self.settings.batch_size)

    def walk(self, epoch: int, step: int, data_seed: int) -> Iterator[Any]:
        """The batches, or `MicroBatches`, of the steps of an epoch from `step` on."""
        return islice(self._endless(epoch, step, data_seed), self.epoch_steps - step)

    def _endless(self, epoch: int, step: int, data_seed: int) -> Iterator[Any]:
        number, first = self.place(epoch, step)
        while True:
            order = self.train.order(data_seed, number)
            batches = self.train.walk(self.settings.batch_size, order, first, noise_seed(data_seed, number))
            yield from batches if self.settings.accumulate == 1 else self._grouped(batches)
            number, first = number + 1, 0

    def _grouped(self, batches: Iterator[Any]) -> Iterator[MicroBatches]:
        while group := list(islice(batches, self.settings.accumulate)):
            weighed = self.weigh(group, self.settings.accumulate)
            yield MicroBatches(tuple(batch for batch, _ in weighed), tuple(weight for _, weight in weighed))
