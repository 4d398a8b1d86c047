"""Where batches come from: the contract, and what samples may turn out to be."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.demand import Sharing

__all__ = ["BatchRequest", "BatchSource", "DrawsError", "StreamSync", "UnevenError"]


class DrawsError(Exception):
    """Fetching samples drew random numbers, from a data set that was thought not to."""


class UnevenError(Exception):
    """A sample is not made like those before it."""


@dataclass(frozen=True)
class BatchRequest:
    """One batch of a walk.

    Args:
        at: indices of its samples, int64 [samples] on the CPU.
        there: the same on the device.
        number: of the batch in its walk.
        order: indices of all samples of the walk, on the CPU.
        first: place of the first sample of the batch in that.
        seed: of the walk, if it has one.
        walks: walks over this data set that are under way.
        alike: of these, walks of this batch size.
        held: samples of two batches of each of them.
    """

    at: Tensor
    there: Tensor
    number: int
    order: Tensor
    first: int
    seed: int | None
    walks: int
    alike: int
    held: int


class BatchSource(ABC):
    """Makes the batches of a data set, and remembers what others may need as well.

    `Batches` asks it for one batch at a time. It may draw from all generators and leave them anywhere. One that raises
    `DrawsError` or `UnevenError` is dropped, and its successor is asked for the same batch; whatever else is raised
    goes to the user, and the source must be as if it had not been asked.
    """

    sharing: Sharing

    @property
    def early(self) -> int:
        """Samples that were fetched, and that nobody has asked for yet."""
        return 0

    @abstractmethod
    def batch(self, cut: BatchRequest) -> Any:
        """A batch on the device, the receiver's own: what is done to it in place is seen by nobody else."""

    @abstractmethod
    def rest(self) -> None:
        """No walk is under way: let go what only those that keep abreast can share."""


class StreamSync:
    """Lets readers wait for what was written on another stream; on the CPU there is nothing to wait for.

    Who writes calls `wait` before and `written` after it, so that each waits for all before; who reads calls `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: torch.cuda.Event | None = None

    def written(self) -> None:
        """All that the current stream was given to write so far is to be waited for."""
        if self._device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Let the current stream wait for what was written."""
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)

    def read(self, values: Any) -> None:
        """The same, and when the tensors among `values` are freed, their memory waits for the current stream."""
        if self._device.type != "cuda":
            return
        self.wait()
        stream = torch.cuda.current_stream(self._device)
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
