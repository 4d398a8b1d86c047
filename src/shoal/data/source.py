"""Base class of batch sources, their requests and errors, and the synchronisation of CUDA streams."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.demand import Sharing
from shoal.data.iterable import PassOrder

__all__ = ["BatchRequest", "BatchSource", "DrawsError", "StreamSync", "UnevenError"]


class DrawsError(Exception):
    """Fetching samples drew random numbers, of a data set that had drawn none."""


class UnevenError(Exception):
    """A sample is of another kind than those before."""


@dataclass(frozen=True)
class BatchRequest:
    """One batch of a walk.

    Args:
        at: Indices of its samples, int64 [samples] on the CPU.
        there: The same on the device.
        number: Number of the batch in its walk.
        order: Indices of all samples of the walk, on the CPU, or the pass over an iterable data set.
        first: Place of the batch's first sample in the order.
        seed: Seed of the walk, or None.
        walks: Number of walks over this data set under way.
        alike: Number of these with this batch size.
        held: Number of samples to hold: twice the batch sizes of all walks.
    """

    at: Tensor
    there: Tensor
    number: int
    order: Tensor | PassOrder
    first: int
    seed: int | None
    walks: int
    alike: int
    held: int


class BatchSource(ABC):
    """Makes the batches of a data set, and keeps samples that other walks may need.

    `Batches` requests one batch at a time. A source may draw from all generators and need not restore them. If it
    raises `DrawsError` or `UnevenError` it is dropped, and its successor gets the same request. Any other exception
    goes to the user; the source must be unchanged then.
    """

    sharing: Sharing

    @property
    def early(self) -> int:
        """Number of fetched samples that no batch has needed yet."""
        return 0

    @abstractmethod
    def batch(self, cut: BatchRequest) -> Any:
        """A batch on the device, which the receiver may change in place."""

    @abstractmethod
    def rest(self) -> None:
        """Drop what only walks that keep abreast can share. Called when no walk is under way."""


class StreamSync:
    """Lets readers of tensors wait for writes on other CUDA streams; on the CPU it does nothing.

    A writer calls `wait` before and `written` after its work, so that writers wait for each other. A reader calls
    `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: torch.cuda.Event | None = None

    def written(self) -> None:
        """Record the writes on the current stream so far, for `wait` and `read`."""
        if self._device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Let the current stream wait for the recorded writes."""
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)

    def read(self, values: Any) -> None:
        """As `wait`; and the memory of tensors in `values` is not used again before the current stream is done."""
        if self._device.type != "cuda":
            return
        self.wait()
        stream = torch.cuda.current_stream(self._device)
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
