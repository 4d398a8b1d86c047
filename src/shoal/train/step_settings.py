"""Training steps of one config: settings that the task returns, and the batches of each step and epoch."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice
from operator import index
from typing import Any

import torch

from shoal.core.errors import TaskError
from shoal.core.plain import plain
from shoal.core.space import is_number
from shoal.core.trial import Config
from shoal.fuse.backward import MicroBatches
from shoal.task import Task, call
from shoal.train.data.batches import Batches
from shoal.train.data.loader import augmentation_seed

__all__ = ["METHODS", "MicroBatch", "StepPlan", "StepSettings", "batch_size", "mixes_steps"]

METHODS = ("batch_size", "eval_batch_size", "accumulate", "clip_norm", "precision", "ema", "steps_per_epoch")
_DTYPES = {"32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_AUTO = "auto"
_MOST_PARTS = 10**6
"""Largest denominator of the share of a pass that a float stands for: 0.05 is 1/20."""

_BF16_CAPABILITY = (8, 0)
"""Least compute capability of NVIDIA GPUs with units for bfloat16 (Ampere)."""


@dataclass(frozen=True)
class StepSettings:
    """Settings of training steps and validation that a task returns for one config; None for what it does not use.

    Args:
        batch_size: Samples of a micro-batch, which is the whole batch unless the task has a `micro_batch_size`.
        accumulate: Micro-batches of a training step.
        micro_batches: Micro-batches of a batch.
    """

    batch_size: int
    eval_batch_size: int
    accumulate: int = 1
    micro_batches: int = 1
    max_norm: float | None = None
    precision: str = "32"
    ema_decay: float | None = None
    steps_per_epoch: int | Fraction | None = None
    keeps_train_modes: bool = False

    @classmethod
    def of(cls, task: Task, config: Config, train: int | None = None, valid: int | None = None) -> "StepSettings":
        """Return the settings of a config, checked against the loaders' batch sizes.

        A task that overrides `step` does its own accumulation, clipping and autocasting, so these stay defaults.
        """
        precision = call(task, "precision", config=config)
        if not isinstance(precision, str) or precision not in (*_DTYPES, _AUTO):
            known = ", ".join(map(repr, (*_DTYPES, _AUTO)))
            raise TaskError(f"the task's `precision` must return one of {known}, got {precision!r}")
        whole = batch_size(task, config, train)
        size = _micro_batch_size(task, whole, train)
        found = cls(
            batch_size=size,
            eval_batch_size=_resolve_batch_size(task, "eval_batch_size", config, valid, size),
            accumulate=_positive_int(task, "accumulate", config) * (whole // size),
            micro_batches=whole // size,
            max_norm=_number(task, "clip_norm", config, "a number of at least 0", lambda value: value >= 0),
            precision=precision,
            ema_decay=_number(task, "ema", config, "a decay of at least 0 and below 1", lambda value: 0 <= value < 1),
            steps_per_epoch=_steps_per_epoch(task, config),
            keeps_train_modes=task._keeps_train_modes,
        )
        if type(task).step is not Task.step:
            asked = {
                "micro_batch_size": found.micro_batches != 1,
                "accumulate": found.accumulate != found.micro_batches,
                "clip_norm": found.max_norm is not None,
                "precision": precision != "32",
            }
            if wrong := [f"`{name}`" for name, set_ in asked.items() if set_]:
                raise TaskError(
                    f"the task overrides `step`, which then does the work of {' and '.join(wrong)} itself; remove one "
                    "of the two"
                )
        return found

    def on(self, device: torch.device) -> "StepSettings":
        """Return the settings on a device: "auto" is "bf16-mixed" on a GPU with units for it, else "32"."""
        if self.precision != _AUTO:
            return self
        has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
        return replace(self, precision="bf16-mixed" if has_units else "32")

    def of_structure(self, on_base: bool) -> tuple[object, ...]:
        """Return the settings, besides the batch size, in which members of an array agree; () for the defaults.

        Trials on a base may differ in the batches of a step, as they share its products, if an epoch is a pass, so that
        their epochs end together, and there is no loss scale, since one is updated after each step of all members.
        """
        differ = on_base and self.steps_per_epoch is None and not self.scales_loss
        division = (1, 1) if differ else self.division
        found = (self.eval_batch_size, *division, self.precision, self.steps_per_epoch)
        return () if found == (self.batch_size, 1, 1, "32", None) else found

    @property
    def division(self) -> tuple[int, int]:
        """Micro-batches of a step and of a batch."""
        return self.accumulate, self.micro_batches

    @property
    def scales_loss(self) -> bool:
        """Whether the precision needs a loss scale."""
        return _DTYPES[self.precision] is torch.float16

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which models run in this precision."""
        dtype = _DTYPES[self.precision]
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@dataclass(frozen=True)
class StepPlan:
    """Divides the passes over a training set into training steps, and the steps into epochs.

    A step takes `settings.accumulate` batches; the last step of a pass may take fewer. An epoch is one pass, or
    `settings.steps_per_epoch` steps, and may then end in the middle of a pass. If that is a share of a pass, an epoch
    ends with the step that completes its share of the samples, so epochs may differ by a step. An iterable training set
    without a length is a single endless pass.
    """

    settings: StepSettings
    train: Batches
    weigh: Callable[[Sequence[Any], int, int], Sequence[tuple[Any, float]]]

    @classmethod
    def of(cls, task: Task, config: Config, train: Batches, valid: Batches) -> "StepPlan":
        """Return the plan of a config."""
        settings = StepSettings.of(task, config, train.batch_size, valid.batch_size)
        if train.endless and not isinstance(settings.steps_per_epoch, int):
            raise TaskError(
                "the training set is iterable and has no length, so the end of an epoch is unknown; return the "
                "training steps of an epoch from the task's `steps_per_epoch`, or give the data set a `__len__`"
            )
        plan = cls(settings, train, task._weigh)
        share = settings.steps_per_epoch
        if isinstance(share, Fraction) and share * plan.pass_samples < plan.step_samples:
            raise TaskError(
                f"the task's `steps_per_epoch` returns {float(share):g}, which of the {plan.pass_samples} "
                f"samples of a pass is less than a step of {plan.step_samples}; return at least "
                f"{plan.step_samples / plan.pass_samples:.3g}, or take smaller batches"
            )
        return plan

    @cached_property
    def pass_batches(self) -> int:
        """Batches of one pass over the training set."""
        return self.train.steps(self.settings.batch_size)

    @cached_property
    def pass_steps(self) -> int:
        """Training steps of one pass."""
        return math.ceil(self.pass_batches / self.settings.accumulate)

    @property
    def pass_samples(self) -> int:
        """Samples of a pass, without those that a loader drops."""
        return min(self.train.samples, self.pass_batches * self.settings.batch_size)

    @property
    def step_samples(self) -> int:
        """Samples of a training step, except for the last ones of a pass."""
        return self.settings.batch_size * self.settings.accumulate

    @cached_property
    def epoch_steps(self) -> int:
        """Training steps of the first epoch; others may have one more or less."""
        return self.steps(0)

    def steps(self, epoch: int) -> int:
        """Return the training steps of an epoch."""
        return self._first_step(epoch + 1) - self._first_step(epoch)

    def _first_step(self, epoch: int) -> int:
        """Return the number of training steps before an epoch."""
        steps = self.settings.steps_per_epoch
        if not isinstance(steps, Fraction):
            return epoch * (steps or self.pass_steps)
        passes, share = divmod(epoch * steps, 1)
        return passes * self.pass_steps + math.ceil(share * self.pass_samples / self.step_samples)

    def locate(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the number of the pass in which a step of an epoch begins, and of its first batch in this pass."""
        number, within = divmod(self._first_step(epoch) + step, self.pass_steps)
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
        return islice(self._endless_batches(epoch, step, data_seed), self.steps(epoch) - step)

    def parts(self, first: int, members: Sequence[StepSettings], order: Any, seed: int) -> "Iterator[list[MicroBatch]]":
        """Yield the batches of a pass, from one on, in runs after which the steps of all members end.

        Args:
            first: Number of the first batch in the pass, with which a step of each member begins.
            members: Settings of each member.
        """
        divisions = [each.division for each in members]
        batches = self.train.iterate(self.settings.batch_size, order, first, seed)
        ahead: dict[int, Any] = {}
        steps: dict[tuple[int, int], MicroBatches] = {}  # division of a step -> the step that runs now
        run: list[MicroBatch] = []
        for number in range(first, self.pass_batches):
            begins = {each for each in divisions if number % each[0] == 0}
            for size, of_batch in begins:
                numbers = range(number, min(number + size, self.pass_batches))
                ahead |= {each: next(batches) for each in numbers if each not in ahead}
                held = [ahead[each] for each in numbers]
                weighed = [(held[0], 1.0)] if size == 1 else self.weigh(held, size, of_batch)
                steps[size, of_batch] = MicroBatches(*(tuple(each) for each in zip(*weighed, strict=True)))
            ends = {each for each in divisions if (number + 1) % each[0] == 0 or number + 1 == self.pass_batches}
            place = {each: number % each[0] for each in steps}
            run.append(
                MicroBatch(
                    number,
                    [steps[each].batches[place[each]] for each in divisions],
                    [steps[each].weights[place[each]] for each in divisions],
                    frozenset(b for b, each in enumerate(divisions) if each in begins),
                    {b: (steps[each], place[each]) for b, each in enumerate(divisions) if each in ends},
                )
            )
            del ahead[number]
            if ends == set(divisions):
                yield run
                run = []

    def _endless_batches(self, epoch: int, step: int, data_seed: int) -> Iterator[Any]:
        number, first = self.locate(epoch, step)
        while True:
            order = self.train.order(data_seed, number)
            batches = self.train.iterate(self.settings.batch_size, order, first, augmentation_seed(data_seed, number))
            yield from batches if self.settings.accumulate == 1 else self._accumulated(batches)
            number, first = number + 1, 0

    def _accumulated(self, batches: Iterator[Any]) -> Iterator[MicroBatches]:
        while step_batches := list(islice(batches, self.settings.accumulate)):
            weighed = self.weigh(step_batches, *self.settings.division)
            yield MicroBatches(tuple(batch for batch, _ in weighed), tuple(weight for _, weight in weighed))


@dataclass(frozen=True)
class MicroBatch:
    """A batch of members whose training steps have different numbers of batches.

    Args:
        number: Number of the batch in the pass.
        batches: The batch of each member; members with steps of one size have the same object.
        weights: Weight of the batch in the loss of each member's step.
        begins: Members whose step begins with the batch.
        steps: Member whose step ends with the batch -> the step, and the batches of it before this one.
    """

    number: int
    batches: Sequence[Any]
    weights: Sequence[float]
    begins: frozenset[int]
    steps: Mapping[int, tuple[Any, int]]


def mixes_steps(members: Iterable[StepSettings]) -> bool:
    """Whether the training steps of members have different numbers of batches, or are weighed otherwise."""
    return len({each.division for each in members}) > 1


def batch_size(task: Task, config: Config, loader: int | None = None) -> int:
    """Return the batch size of a config, with which a `DataLoader` for training must agree."""
    if loader is not None and "batch_size" in config and not _overrides(task, "batch_size"):
        return _check_equal(
            _positive_int(task, "batch_size", config), loader, 'the config\'s "batch_size" is', "batch_size"
        )
    return _resolve_batch_size(task, "batch_size", config, loader)


def _micro_batch_size(task: Task, whole: int, loader: int | None) -> int:
    """Return the samples of a batch of `whole` samples that are computed at once."""
    size: Any = plain(task.micro_batch_size)
    if size is None:
        return whole
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TaskError(f"`micro_batch_size` of a task must be a positive integer or None, got {size!r}")
    if loader is not None:
        raise TaskError(
            f"`micro_batch_size` of the task is {size}, and its `data` returns a loader, which has batches of its own; "
            "return the data set in its place (TrainerTask: without dataloader_drop_last)"
        )
    if whole > size and whole % size:
        raise TaskError(
            f"a batch of {whole} samples cannot be divided by `micro_batch_size` of the task, {size}; search batch "
            f"sizes that are multiples of it, or set it to {math.gcd(whole, size)}"
        )
    return min(whole, size)


def _resolve_batch_size(task: Task, method: str, config: Config, loader: int | None, default: int | None = None) -> int:
    """Return the batch size of the task's method if it is overridden, else of the loader, else the default."""
    if not _overrides(task, method):
        return loader or default or _positive_int(task, method, config)
    return _check_equal(_positive_int(task, method, config), loader, f"the task's `{method}` returns", method)


def _check_equal(size: int, loader: int | None, whose: str, method: str) -> int:
    if loader is not None and loader != size:
        which = "training" if method == "batch_size" else "validation"
        raise TaskError(
            f"the {which} loader of the task's `data` has batches of {loader}, but {whose} {size}; make the loader "
            f"with batch_size=self.{method}(config), or return its data set in its place, or leave out the other "
            "batch size"
        )
    return size


def _overrides(task: Task, method: str) -> bool:
    return isinstance(task, Task) and getattr(type(task), method) is not getattr(Task, method)


def _positive_int(task: Task, method: str, config: Config) -> int:
    returned: Any = call(task, method, config=config)
    size = 0
    if not isinstance(returned, bool) and getattr(returned, "dtype", None) != torch.bool:
        with suppress(TypeError):
            size = index(returned)
    if not 1 <= size <= sys.maxsize:
        raise TaskError(
            f"the task's `{method}` must return a positive integer, got {returned!r} for {dict(config)}; "
            f"return an int from 1 to {sys.maxsize}"
        )
    return size


def _steps_per_epoch(task: Task, config: Config) -> int | Fraction | None:
    returned: Any = plain(call(task, "steps_per_epoch", config=config))
    if returned is None:
        return None
    if isinstance(returned, float):
        if 1 / _MOST_PARTS <= returned < 1:
            return Fraction(returned).limit_denominator(_MOST_PARTS)
        raise TaskError(
            f"the task's `steps_per_epoch` must return a positive integer, or a share of a pass below 1, got "
            f"{returned!r} for {dict(config)}"
        )
    return _positive_int(task, "steps_per_epoch", config)


def _number(task: Task, method: str, config: Config, kind: str, fits: Callable[[float], bool]) -> float | None:
    returned: Any = plain(call(task, method, config=config))
    if returned is None:
        return None
    if not is_number(returned) or not fits(returned):
        raise TaskError(f"the task's `{method}` must return {kind}, or None, got {returned!r} for {dict(config)}")
    return float(returned)
