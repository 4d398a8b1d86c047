"""Base class of batch sources, their requests and units of samples, errors, and synchronisation of CUDA streams."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.demand import SampleSharing
from shoal.fuse.constants import to_device
from shoal.train.data.iterable import PassOrder

__all__ = [
    "BLOCK",
    "BatchRequest",
    "BatchSource",
    "HostToDevice",
    "RandomSampleError",
    "SampleKindError",
    "StreamSync",
    "Unit",
    "blocks",
]

BLOCK = 32
"""Number of consecutive samples of a block. A check for drawn random numbers after each sample would take long compared
with decoding a small image."""


class Unit(NamedTuple):
    """Consecutive samples of an order, from `first` to `end`, that are fetched together: a block or a batch."""

    seed: int
    number: int
    first: int
    end: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.end - self.first

    def next_units(self, samples: int, order: int) -> list["Unit"]:
        """Return the next units in an order of `order` samples, with at most `samples` samples in total."""
        after = enumerate(range(self.end, order, self.samples), start=self.number + 1)
        units = (Unit(self.seed, number, first, min(first + self.samples, order)) for number, first in after)
        return list(islice(units, samples // self.samples))


def blocks(seed: int, first: int, end: int, order: int) -> list[Unit]:
    """Return the blocks that contain the samples between two positions, in an order of `order` samples."""
    starts = range(first - first % BLOCK, end, BLOCK)
    return [Unit(seed, start // BLOCK, start, min(start + BLOCK, order)) for start in starts]


class RandomSampleError(Exception):
    """Fetching samples drew random numbers from a data set that had drawn none before."""


class SampleKindError(Exception):
    """A sample is of another kind than the samples before it."""


@dataclass(frozen=True)
class BatchRequest:
    """Request of an iterator for one batch.

    Args:
        indices: Indices of the samples, int64 [samples] on the CPU.
        order: Indices of all samples of the iterator, on the CPU, or the pass over an iterable data set.
        iterators: Number of active iterators over this data set.
        same_size_iterators: Number of active iterators with this batch size.
        window_samples: Number of samples to hold, twice the batch sizes of all iterators.
    """

    indices: Tensor
    device_indices: Tensor
    number: int
    order: Tensor | PassOrder
    first: int
    seed: int | None
    iterators: int
    same_size_iterators: int
    window_samples: int


class BatchSource(ABC):
    """Makes the batches of a data set, and keeps samples that other iterators may need.

    `Batches` requests one batch at a time. A source may draw from all generators and need not restore them. If it
    raises `RandomSampleError` or `SampleKindError`, `Batches` replaces the source and repeats the request. Any other
    exception is raised to the user and must leave the source unchanged.
    """

    sample_sharing: SampleSharing

    @property
    def prefetched(self) -> int:
        """Number of fetched samples that no batch has needed yet."""
        return 0

    @abstractmethod
    def batch(self, request: BatchRequest) -> Any:
        """Return a batch on the device, which the receiver may change in place."""

    @abstractmethod
    def release(self) -> None:
        """Drop the samples that only iterators in lockstep can share. Called when no iterator is active."""


class HostToDevice:
    """Copies batches to a device; to a GPU from pinned memory on a stream of its own, beside the step before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Any) -> Any:
        """Return nested values with their tensors on the device, ready for the current stream; others as they are."""
        move = partial(pytree.tree_map_only, Tensor, lambda tensor: to_device(tensor, self._device))
        if self._device.type != "cuda":
            return move(batch)
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = move(batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in pytree.tree_leaves(moved):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(current)
        return moved


class StreamSync:
    """Makes readers of tensors wait for writes on other CUDA streams; on the CPU it does nothing.

    A writer calls `wait_for_writes` before its work and `record_write` after it; a reader calls `prepare_read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: torch.cuda.Event | None = None

    def record_write(self) -> None:
        """Record the writes on the current stream so far, for `wait_for_writes` and `prepare_read`."""
        if self._device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self._device))

    def wait_for_writes(self) -> None:
        """Make the current stream wait for the recorded writes."""
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)

    def prepare_read(self, values: Any) -> None:
        """Call `wait_for_writes`, and prevent reuse of the memory of `values` until the current stream is done."""
        if self._device.type != "cuda":
            return
        self.wait_for_writes()
        stream = torch.cuda.current_stream(self._device)
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
