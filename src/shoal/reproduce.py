"""Order of samples and random numbers of a trial, for plain loops that reproduce it.

A study trains each trial, alone or fused, as follows:

- `data` and `base` are called with torch's, Python's and NumPy's generators seeded with 0; `model`, then `optimizer`,
  with these seeded with `trial.seed`. A task with a `base` is called as `model(config, base)`, with its parameters
  frozen. The model is made on the CPU, moved to the device, and set to training.
- Each epoch visits the training set in `sample_order`, and cuts it into batches of `task.batch_size(config)`. With
  `task.micro_batch_size` it is cut into micro-batches of so many samples; several make a batch, and "batch" below means
  micro-batch. Of a `DataLoader` from `data`, the sampler gives the order (shuffle=True: as for a data set), and its
  batch size and `drop_last` are kept. The validation set is visited in ascending order, or in that of a sampler, in
  batches of `task.eval_batch_size(config)`, or of `micro_batch_size` if that is not overridden.
- A pass over an iterable data set begins within `sample_randomness(trial, number, 0)`, which all its samples draw from;
  `set_epoch(number)` is called before. Passes are numbered from 0; the number of each validation is None.
- Each batch of training runs within `randomness(trial, step)`, where `step` counts batches from 0 over all epochs
  (`Task.accumulate` makes one training step of several batches, in which Python's and NumPy's generators are seeded
  for the first one and continue from there). With `Task.steps_per_epoch`, read "pass over the
  training set" for "epoch".
- The batches of a validation run within `randomness(trial, -1)`, -2, -3 ..., the same at each epoch: `loss` first, then
  `metrics`.
- Samples that draw random numbers (a random crop) are fetched within `sample_randomness`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shoal.core.errors import ShoalError
from shoal.core.plain import plain
from shoal.core.trial import step_seed
from shoal.fuse.generators import PythonRngSnapshot, preserved_rng, seed_all
from shoal.fuse.intercept import member_run
from shoal.fuse.randomness import RandomSource, member_keys
from shoal.train.data.loader import augmentation_seed, epoch_order, is_iterable, parse_loader

__all__ = ["Seeded", "randomness", "sample_order", "sample_randomness"]


class Seeded(Protocol):
    """An object with the seeds of a trial: `study.best_trial`, one of `study.trials`, or the `trial` of such a row."""

    @property
    def seed(self) -> int:
        """Seed of initial weights and dropout."""

    @property
    def data_seed(self) -> int:
        """Seed of the order of samples."""


def sample_order(trial: Seeded, epoch: int, samples: int | DataLoader[Any]) -> Tensor:
    """Return the order in which an epoch of a trial visits its training set.

    Args:
        trial: Trial, such as `study.best_trial`.
        epoch: Number of the epoch, from 0.
        samples: Size of the training set; or the `DataLoader` that `data` returns as training set, whose sampler
            decides.

    Returns:
        Indices, int64 [samples]; `.split(batch_size)` gives those of the batches.

    Raises:
        ShoalError: An argument is invalid, the data set is iterable, or a study refuses the loader.
    """
    epoch, samples = plain(epoch), plain(samples)
    if not isinstance(samples, DataLoader):
        _check(trial, epoch=(epoch, 0), samples=(samples, 1))
        return epoch_order(samples, trial.data_seed, epoch)
    _check(trial, epoch=(epoch, 0))
    dataset, _, settings = parse_loader(samples, "training")
    if is_iterable(dataset):
        raise ShoalError(
            f"`samples` is a loader of an iterable data set ({type(dataset).__name__}), whose order is its own; "
            "iterate over that within shoal.sample_randomness(trial, epoch, 0)"
        )
    count = settings.samples(dataset)
    order = settings.indices(count, trial.data_seed, epoch)
    return torch.arange(count) if order is None else order


@contextmanager
def randomness(trial: Seeded, step: int, array: bool = True) -> Iterator[None]:
    """Make torch draw the random numbers that a step of a trial draws in a study, alone or fused.

    They are not those of `torch.manual_seed`. Draws of torch functions without a generator argument (dropout, also in
    attention, `torch.rand`) depend on the trial's seed, the step, and the number of such draws before in the step. They
    do not depend on other trials of the array nor, for dropout, on device and dtype. Python's and NumPy's generators
    are seeded with the trial's data seed and the step. All generators are restored at the end.

    Args:
        trial: Trial, such as `study.best_trial`.
        step: Number of the step, from 0 over all epochs; -1, -2, ... for the batches of a validation.
        array: Whether the model can draw numbers of its own. False for dropout under re-entrant checkpointing, as the
            study's log says: it draws from the generators themselves, seeded with the trial's seed and the step.

    Raises:
        ShoalError: An argument is invalid.
        FusionError: A part under re-entrant checkpointing or an array of `shoal.fuse` runs within the context, or it
            begins and draws within a part under `torch.utils.checkpoint`.

    Example:
        with shoal.randomness(study.best_trial, step=0):
            loss = F.cross_entropy(model(x), y)
    """
    step = plain(step)
    _check(trial, step=(step, None))
    with _generators(step_seed(trial.data_seed if array else trial.seed, step)):
        if not array:
            yield
            return
        with member_run(RandomSource(partial(member_keys, [trial.seed], [step]), single_member=True)):
            yield


@contextmanager
def sample_randomness(trial: Seeded, epoch: int | None, batch: int) -> Iterator[None]:
    """Make the generators of torch, Python and NumPy give the numbers that the samples of a batch draw in a study.

    For data sets that draw, such as those with random crops: fetch the samples of one batch within the context, in
    order. All generators are restored at the end. With `Task.shared_augmentation` a study draws by blocks of samples
    instead.

    Args:
        trial: Trial, such as `study.best_trial`.
        epoch: Number of the epoch, from 0; None for the validation set, which draws the same numbers at each epoch.
        batch: Number of the batch in the epoch, from 0.

    Raises:
        ShoalError: An argument is invalid.

    Example:
        with shoal.sample_randomness(trial, epoch, batch):
            x, y = default_collate([train[i] for i in rows])
    """
    epoch, batch = plain(epoch), plain(batch)
    _check(trial, epoch=(0 if epoch is None else epoch, 0), batch=(batch, 0))
    with _generators(augmentation_seed(trial.data_seed, epoch) + batch):
        yield


def _check(trial: object, **numbers: tuple[object, int | None]) -> None:
    """Check that the trial has seeds, and that each number, given with its least value, is a valid integer."""
    if not all(isinstance(getattr(trial, name, None), int) for name in ("seed", "data_seed")):
        raise ShoalError(f"`trial` must be a trial, such as study.best_trial or study.trials[0], got {trial!r}")
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least}"
            raise ShoalError(f"`{name}` must be an integer{bound}, got {value!r}")


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Seed the default generators within this context; restore them at the end."""
    device = torch.device("cpu")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    others = PythonRngSnapshot()
    try:
        with preserved_rng(device):
            seed_all(seed, device)
            yield
    finally:
        others.restore()
