"""Iterable data sets, read by index in ascending order; each pass has its own random numbers."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import TaskError
from shoal.fuse.generators import DrawDetector, PythonRngSnapshot, seed_all
from shoal.train.data.loader import augmentation_seed

__all__ = ["IterableReader", "PassOrder"]

_log = logging.getLogger("shoal.pack")

PASS_STRIDE = 1 << 40
"""Distance between the indices of two passes. Also the length of a data set without one, whose passes count as a single
pass."""

SPARE_CURSORS = 4
"""Number of cursors that are kept in addition to one for each active iterator, for trials that wait and continue later.
"""

_CPU = torch.device("cpu")
_END = object()


@dataclass(frozen=True)
class PassOrder:
    """Indices of one pass in ascending order. Slicing creates the indices on demand, since a pass may have no end."""

    first: int
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, part: slice) -> Tensor:
        indices = range(self.first, self.first + self.samples)[part]
        return torch.arange(indices.start, indices.stop, device="cpu")


class IterableReader:
    """Reads samples of an iterable data set at several positions at once.

    A pass is one iteration over the data set. At its start, the generators of torch (CPU), Python and NumPy are seeded
    with the data seed and the number of the pass. Their states are saved and restored between reads, so draws elsewhere
    do not affect the pass. If the data set has no length, the passes follow one another as one endless sequence.

    A cursor is an iterator with its position. A read takes the nearest cursor before its position, or a new one, and
    drops the samples in between. So a sample must depend only on its position and on draws from the generators.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.active_iterators = 0
        self._dataset = dataset
        self._label = f"the {name} set ({type(dataset).__name__})"
        self._length = _length(dataset)
        self._passes: list[tuple[int, int | None]] = []  # data seed and epoch of the passes requested so far
        self._cursors: list[_Cursor] = []  # ordered by last use, the latest last
        self._epoch: int | None = None  # the last argument of `set_epoch`
        self._warned = False

    @property
    def endless(self) -> bool:
        """Whether the data set has no length, so that its passes are one sequence without an end."""
        return self._length is None

    def __len__(self) -> int:
        return PASS_STRIDE if self._length is None else self._length

    def order(self, data_seed: int, epoch: int | None) -> PassOrder:
        """Return the indices of a pass (None: over the validation set), or of the endless sequence from it on."""
        if (data_seed, epoch) not in self._passes:
            self._passes.append((data_seed, epoch))
        return PassOrder(self._passes.index((data_seed, epoch)) * PASS_STRIDE, len(self))

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of one pass at ascending indices, and restore all generators.

        After an error of the data set, the next read starts a new iteration.
        """
        number, position = divmod(indices[0], PASS_STRIDE)
        cursor = self._cursor(number, position)
        samples = cursor.read([index % PASS_STRIDE for index in indices])
        if cursor.position < len(self):
            self._cursors = [*self._cursors, cursor][-self.active_iterators - SPARE_CURSORS :]
        return samples

    def _cursor(self, number: int, position: int) -> "_Cursor":
        """Remove and return the nearest cursor at or before a position of a pass, or return a new one."""
        before = [each for each in self._cursors if each.number == number and each.position <= position]
        if before:
            nearest = max(before, key=lambda each: each.position)
            self._cursors.remove(nearest)
            return nearest
        if position > 0 and not self._warned:
            self._warned = True
            _log.warning(
                "%s is iterable: %d samples are read and dropped to reach the place where trials continue, as whenever "
                "trials continue at a place that no iterator of this process is at",
                self._label,
                position,
            )
        return _Cursor(self, number, *self._passes[number])

    def start_pass(self, data_seed: int, epoch: int | None) -> Iterator[Any]:
        """Seed the generators for a pass, and start it."""
        self.set_epoch(epoch)
        seed_all(augmentation_seed(data_seed, epoch), _CPU)
        iterator: Iterator[Any] = iter(self._dataset)
        if iterator is self._dataset:
            raise TaskError(
                f"`__iter__` of {self._label} returns the data set itself, so that trials at two places would take "
                "each other's samples; write `__iter__` with `yield`, or let it return a new iterator at each call"
            )
        return iterator

    def set_epoch(self, epoch: int | None) -> None:
        """Call `set_epoch` of the data set, unless the last call had the same argument."""
        number = epoch or 0
        if self._epoch != number and callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(number)
        self._epoch = number

    def length_error(self, epoch: int | None, position: int, ended: bool) -> TaskError:
        """Return the error for a pass that yields another number of samples than the length of the data set."""
        where = "a validation" if epoch is None else f"pass {epoch}"
        if self.endless:
            return TaskError(
                f"{self._label} yields nothing in {where}; each call of its `__iter__` must begin anew and yield "
                "samples"
            )
        found = f"ended after {position} samples" if ended else f"yields more than {position} samples"
        return TaskError(
            f"{self._label} {found} in {where}, and its `__len__` returns {self._length}; each call of its `__iter__` "
            "must begin anew and yield that many"
        )


class _Cursor:
    """Position in a pass: an iterator of the data set, and the states of the generators."""

    def __init__(self, reader: IterableReader, number: int, data_seed: int, epoch: int | None) -> None:
        self.number = number
        self.position = 0
        self._reader = reader
        self._data_seed = data_seed
        self._epoch = epoch
        self._samples: Iterator[Any] | None = None
        self._generator_states = _generator_states()

    def read(self, positions: Sequence[int]) -> list[Any]:
        outer_states = _generator_states()
        try:
            if self._samples is None:
                self._samples = self._reader.start_pass(self._data_seed, self._epoch)
            else:
                self._reader.set_epoch(self._epoch)
                _restore_generators(self._generator_states)
            samples = [self._read_until(position) for position in positions]
            if self.position == len(self._reader) and next(self._samples, _END) is not _END:
                raise self._reader.length_error(self._epoch, self.position, ended=False)
            self._generator_states = _generator_states()
            return samples
        finally:
            _restore_generators(outer_states)

    def _read_until(self, position: int) -> Any:
        while self.position < position:
            self._next()
        return self._next()

    def _next(self) -> Any:
        assert self._samples is not None
        sample = next(self._samples, _END)
        if sample is _END and self._reader.endless:
            self._epoch = (self._epoch or 0) + 1
            self._samples = self._reader.start_pass(self._data_seed, self._epoch)
            sample = next(self._samples, _END)
        if sample is _END:
            raise self._reader.length_error(self._epoch, self.position, ended=True)
        self.position += 1
        return sample


def _generator_states() -> tuple[DrawDetector, PythonRngSnapshot]:
    return DrawDetector(_CPU), PythonRngSnapshot()


def _restore_generators(states: tuple[DrawDetector, PythonRngSnapshot]) -> None:
    for each in states:
        each.restore()


def _length(dataset: Any) -> int | None:
    """Return the length of a data set; None if `__len__` is missing or not implemented."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
