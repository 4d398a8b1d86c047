"""The order of samples and the random numbers of a trial, for a plain loop that is to equal it.

What a study does with a trial, alone or fused, in terms of these:

- `data` is called with torch's, Python's and NumPy's generators seeded with 0, `model` and then `optimizer` with these
  seeded with `trial.seed`. The model is made on the CPU, then moved, then set to training.
- Each epoch visits the training set in `sample_order`, and cuts it into batches of `task.batch_size(config)`.
- Each training step runs within `randomness(trial, step)`, where `step` counts from 0 over all epochs.
- The batches of a validation run within `randomness(trial, -1)`, -2, -3 ..., the same at each epoch; `loss` first, then
  `metrics`.
- What samples of a data set draw themselves (a random crop), they draw within `sample_randomness`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.trial import step_seed
from shoal.data.batches import epoch_order, noise_seed
from shoal.fuse.generators import OtherGenerators, reseed, undrawn
from shoal.fuse.intercept import member_run
from shoal.fuse.randomness import Randomness, member_keys

__all__ = ["Seeded", "randomness", "sample_order", "sample_randomness"]


class Seeded(Protocol):
    """What has the seeds of a trial: `study.best_trial`, one of `study.trials`, or the `trial` of such a row."""

    @property
    def seed(self) -> int:
        """Of initial weights and dropout."""

    @property
    def data_seed(self) -> int:
        """Of the order of samples."""


def sample_order(trial: Seeded, epoch: int, samples: int) -> Tensor:
    """The order in which an epoch of a trial visits its training set.

    Args:
        trial: such as `study.best_trial`.
        epoch: from 0.
        samples: size of the training set.

    Returns:
        Indices, int64 [samples]; `.split(batch_size)` are those of the batches.

    Raises:
        ShoalError: an argument is not what it is to be.
    """
    _check(trial, epoch=(epoch, 0), samples=(samples, 1))
    return epoch_order(samples, trial.data_seed, epoch)


@contextmanager
def randomness(trial: Seeded, step: int, array: bool = True) -> Iterator[None]:
    """Within, torch draws the random numbers that a step of a trial draws in a study, alone or fused.

    These are no numbers of `torch.manual_seed`. What functions of torch draw without a generator of their own (dropout,
    that of attention, `torch.rand`) depends on the trial's seed, the step, and how many of them came before within it,
    so not on who shares the array, nor, for dropout, on device and dtype. Python's and NumPy's generators are seeded
    with the trial's data seed and the step. After it all generators are as they were.

    Args:
        trial: such as `study.best_trial`.
        step: from 0 over all epochs; -1, -2, ... for the batches of a validation.
        array: false for a model with dropout under `torch.utils.checkpoint`, which cannot be given numbers of its own,
            as the study's log says: it draws those of the generators themselves, all seeded with the trial's seed and
            the step.

    Raises:
        ShoalError: an argument is not what it is to be.
        FusionError: within, a random function runs under `torch.utils.checkpoint`, or an array of `shoal.fuse` runs.

    Example:
        with shoal.randomness(study.best_trial, step=0):
            loss = F.cross_entropy(model(x), y)
    """
    _check(trial, step=(step, None))
    with _generators(step_seed(trial.data_seed if array else trial.seed, step)):
        if not array:
            yield
            return
        with member_run(Randomness(partial(member_keys, [trial.seed], [step]), alone=True)):
            yield


@contextmanager
def sample_randomness(trial: Seeded, epoch: int | None, batch: int) -> Iterator[None]:
    """Within, the generators of torch, Python and NumPy give what the samples of a batch draw in a study.

    For data sets that draw, such as those with random crops: fetch the samples of one batch within, in order. After it
    all generators are as they were. With `Task.shared_augmentation` a study draws by blocks of samples instead.

    Args:
        trial: such as `study.best_trial`.
        epoch: from 0; None for the validation set, which draws the same numbers at each epoch.
        batch: from 0, within the epoch.

    Raises:
        ShoalError: an argument is not what it is to be.

    Example:
        with shoal.sample_randomness(trial, epoch, batch):
            x, y = default_collate([train[i] for i in rows])
    """
    _check(trial, epoch=(0 if epoch is None else epoch, 0), batch=(batch, 0))
    with _generators(noise_seed(trial.data_seed, epoch) + batch):
        yield


def _check(trial: object, **numbers: tuple[object, int | None]) -> None:
    """Refuse what has no seeds, and numbers that are no integers of at least the second of the pair."""
    if not all(isinstance(getattr(trial, name, None), int) for name in ("seed", "data_seed")):
        raise ShoalError(f"`trial` must be a trial, such as study.best_trial or study.trials[0], got {trial!r}")
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least}"
            raise ShoalError(f"`{name}` must be an integer{bound}, got {value!r}")


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Within, the default generators are seeded; after it they are as before."""
    device = torch.device("cpu")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    others = OtherGenerators()
    try:
        with undrawn(device):
            reseed(seed, device)
            yield
    finally:
        others.restore()
