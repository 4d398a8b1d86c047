"""Iterable data sets: their passes, each with its own random numbers, are read by index in ascending order."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import TaskError
from shoal.data.loader import noise_seed
from shoal.fuse.generators import DrawDetector, PythonRngSnapshot, seed_all

__all__ = ["IterableReader", "PassOrder"]

_log = logging.getLogger("shoal.pack")

ENDLESS = 1 << 40
"""Samples of a data set without a length, whose passes count as one. The indices of two passes are this far apart."""

SPARE = 4
"""Number of cursors that are kept beside those of the walks under way, for trials that wait and go on later."""

_CPU = torch.device("cpu")
_END = object()


@dataclass(frozen=True)
class PassOrder:
    """The indices of one pass in ascending order. A slice of it makes them, since a pass may have no end.

    Args:
        first: Index of the first sample.
        samples: Number of samples.
    """

    first: int
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, part: slice) -> Tensor:
        indices = range(self.first, self.first + self.samples)[part]
        return torch.arange(indices.start, indices.stop, device="cpu")


class IterableReader:
    """Reads samples of an iterable data set, from several places at once.

    A pass is one iteration. At its start, the generators of torch (CPU), Python and NumPy are seeded with the data seed
    and the number of the pass, and go on with it, whatever is drawn elsewhere in between. If the data set has a length,
    each epoch is a pass. If not, the passes follow one another as one sequence without an end.

    A cursor is an iterator at its place. Reading at a place takes the nearest cursor before it, or a new one, which
    reads and drops the samples before. So samples must depend only on their place and on draws from the generators.

    Args:
        dataset: Data set whose `__iter__` begins anew at each call. Its `set_epoch` gets the number of the pass, if it
            has one.
        name: Name for messages.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.walks = 0
        """Number of walks under way."""
        self._dataset = dataset
        self._whose = f"the {name} set ({type(dataset).__name__})"
        self._length = _length(dataset)
        self._passes: list[tuple[int, int | None]] = []  # data seed and epoch of the passes that were asked for
        self._cursors: list[_Cursor] = []  # the one that was used last is the last
        self._epoch: int | None = None  # the last argument of `set_epoch`
        self._said = False

    @property
    def endless(self) -> bool:
        """Whether the data set has no length, so that its passes are one sequence without an end."""
        return self._length is None

    def __len__(self) -> int:
        return ENDLESS if self._length is None else self._length

    def order(self, data_seed: int, epoch: int | None) -> PassOrder:
        """The indices of a pass.

        Args:
            data_seed: Data seed of the trial.
            epoch: Number of the pass; None for one over the validation set. Of an endless sequence, the first one's.
        """
        if (data_seed, epoch) not in self._passes:
            self._passes.append((data_seed, epoch))
        return PassOrder(self._passes.index((data_seed, epoch)) * ENDLESS, len(self))

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Samples of one pass. All generators are restored.

        Args:
            indices: Indices in ascending order; samples between them are dropped.

        Raises:
            TaskError: The data set yields another number of samples than its length, or none, or is its own iterator.
            Exception: Whatever the data set raises. The next read begins a new iteration.
        """
        number, place = divmod(indices[0], ENDLESS)
        cursor = self._cursor(number, place)
        samples = cursor.read([index % ENDLESS for index in indices])
        if cursor.place < len(self):
            self._cursors = [*self._cursors, cursor][-self.walks - SPARE :]
        return samples

    def _cursor(self, number: int, place: int) -> "_Cursor":
        """The nearest cursor before a place of a pass; `_cursors` holds it no more."""
        before = [each for each in self._cursors if each.number == number and each.place <= place]
        if before:
            nearest = max(before, key=lambda each: each.place)
            self._cursors.remove(nearest)
            return nearest
        if place > 0 and not self._said:
            self._said = True
            _log.warning(
                "%s is iterable: %d samples are read and dropped to reach the place at which trials go on, as whenever "
                "trials go on at a place that no iterator of this process is at",
                self._whose,
                place,
            )
        return _Cursor(self, number, *self._passes[number])

    def begin(self, data_seed: int, epoch: int | None) -> Iterator[Any]:
        """Seed the generators for a pass, and begin it.

        Raises:
            TaskError: The data set is its own iterator.
        """
        self.set_epoch(epoch)
        seed_all(noise_seed(data_seed, epoch), _CPU)
        iterator: Iterator[Any] = iter(self._dataset)
        if iterator is self._dataset:
            raise TaskError(
                f"`__iter__` of {self._whose} returns the data set itself, so that trials at two places would take "
                "each other's samples; write `__iter__` with `yield`, or let it return a new iterator at each call"
            )
        return iterator

    def set_epoch(self, epoch: int | None) -> None:
        """Call `set_epoch` of the data set, unless its last argument was the same."""
        number = epoch or 0
        if self._epoch != number and callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(number)
        self._epoch = number

    def wrong_end(self, epoch: int | None, place: int, ended: bool) -> TaskError:
        """The error about a pass that ends too early or too late.

        Args:
            epoch: Number of the pass, or None.
            place: Number of samples so far.
            ended: Whether it ended.
        """
        where = "a validation" if epoch is None else f"pass {epoch}"
        if self.endless:
            return TaskError(
                f"{self._whose} yields nothing in {where}; each call of its `__iter__` must begin anew and yield "
                "samples"
            )
        found = f"ended after {place} samples" if ended else f"yields more than {place} samples"
        return TaskError(
            f"{self._whose} {found} in {where}, and its `__len__` returns {self._length}; each call of its `__iter__` "
            "must begin anew and yield that many"
        )


class _Cursor:
    """A place in a pass: an iterator, and the states of the generators there.

    Args:
        reader: Reader of the data set.
        number: Number of the pass among those of the reader.
        data_seed: Data seed of the pass.
        epoch: Number of the pass; None for one over the validation set.
    """

    def __init__(self, reader: IterableReader, number: int, data_seed: int, epoch: int | None) -> None:
        self.number = number
        self.place = 0
        """Number of samples read."""
        self._reader = reader
        self._data_seed = data_seed
        self._epoch = epoch
        self._samples: Iterator[Any] | None = None
        self._states = _states()

    def read(self, places: Sequence[int]) -> list[Any]:
        """Read on, and return the samples at some later places, in ascending order."""
        outside = _states()
        try:
            if self._samples is None:
                self._samples = self._reader.begin(self._data_seed, self._epoch)
            else:
                self._reader.set_epoch(self._epoch)
                _restore(self._states)
            samples = [self._at(place) for place in places]
            if self.place == len(self._reader) and next(self._samples, _END) is not _END:
                raise self._reader.wrong_end(self._epoch, self.place, ended=False)
            self._states = _states()
            return samples
        finally:
            _restore(outside)

    def _at(self, place: int) -> Any:
        while self.place < place:
            self._next()
        return self._next()

    def _next(self) -> Any:
        assert self._samples is not None
        sample = next(self._samples, _END)
        if sample is _END and self._reader.endless:
            self._epoch = (self._epoch or 0) + 1
            self._samples = self._reader.begin(self._data_seed, self._epoch)
            sample = next(self._samples, _END)
        if sample is _END:
            raise self._reader.wrong_end(self._epoch, self.place, ended=True)
        self.place += 1
        return sample


def _states() -> tuple[DrawDetector, PythonRngSnapshot]:
    return DrawDetector(_CPU), PythonRngSnapshot()


def _restore(states: tuple[DrawDetector, PythonRngSnapshot]) -> None:
    for each in states:
        each.restore()


def _length(dataset: Any) -> int | None:
    """The length of a data set; None if it has none, or does not know it."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
