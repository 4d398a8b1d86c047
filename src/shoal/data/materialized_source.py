"""Batches of a data set whose samples are decoded once and kept on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.core.demand import Sharing
from shoal.data.fetch import Fetcher
from shoal.data.iterable import PassOrder
from shoal.data.processes import FetchRequest
from shoal.data.samples import kind
from shoal.data.source import BatchRequest, BatchSource, StreamSync, UnevenError
from shoal.data.unit import BLOCK, Unit, blocks

__all__ = ["MaterializedSource", "materialized_bytes"]

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size -> integer dtype with the same bits, as not all dtypes can be indexed."""


def materialized_bytes(batch: Any, rows: int, samples: int) -> int | None:
    """Bytes of a whole data set on the device.

    Args:
        batch: Some of its samples, collated.
        rows: Number of these samples.
        samples: Number of all samples.

    Returns:
        Bytes; None if the batch does not consist of dense tensors.
    """
    leaves = pytree.tree_leaves(batch)
    if not all(map(_has_rows, leaves)):
        return None
    held: int = sum(leaf.nbytes for leaf in leaves)
    return held * samples // rows


class MaterializedSource(BatchSource):
    """Keeps all samples of a data set that draws no random numbers and has samples of one kind.

    Args:
        fetcher: Fetcher of the data set.
        samples: Number of samples.
        first: Some of the samples.
        device: Device to keep all samples on.
    """

    sharing: Sharing = "kept"

    def __init__(self, fetcher: Fetcher, samples: int, first: Sequence[Any], device: torch.device) -> None:
        self._fetcher = fetcher
        self._device = device
        self._kind = kind(first[0])
        leaves, self._spec = pytree.tree_flatten(default_collate(list(first)))
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._columns = [
            torch.empty((samples, *leaf.shape[1:]), dtype=_bits(leaf).dtype, device=device) for leaf in leaves
        ]
        self._there = torch.zeros(samples, dtype=torch.bool, device="cpu")
        self._missing = samples
        self._stream_sync = StreamSync(device)

    @property
    def unfilled(self) -> int:
        """Bytes of host memory that missing samples will take. GPU memory is taken at once."""
        if self._device.type != "cpu":
            return 0
        return sum(column.nbytes for column in self._columns) * self._missing // len(self._there)

    def batch(self, cut: BatchRequest) -> Any:
        """The rows of the batch; missing samples are fetched first.

        Raises:
            DrawsError: Fetching drew random numbers.
            UnevenError: A sample is of another kind than the first.
        """
        if self._missing and (missing := self._absent(cut.at)):
            if cut.seed is None or not self._fetcher.ahead:
                self._put(missing, self._fetcher.fetch_undrawn(missing))
            else:
                self._receive(cut, cut.seed)
        self._stream_sync.read(self._columns)
        rows = (column.index_select(0, cut.there) for column in self._columns)
        leaves = [bits.view(dtype) for bits, dtype in zip(rows, self._dtypes, strict=True)]
        return pytree.tree_unflatten(leaves, self._spec)

    def rest(self) -> None:
        """Drop what loader processes have fetched in advance; all other samples stay."""
        self._fetcher.forget()

    def _absent(self, at: Tensor) -> list[int]:
        """The indices among these whose samples are missing, each once."""
        return list(dict.fromkeys(at[~self._there[at]].tolist()))

    def _receive(self, cut: BatchRequest, seed: int) -> None:
        """Keep the samples of a batch from the loader processes, which go on with the next blocks of the walk."""
        for unit in blocks(seed, cut.first, cut.first + len(cut.at), len(cut.order)):
            if (wanted := self._request(unit, cut.order)) is not None:
                followers = unit.followers(self._fetcher.ahead * BLOCK, len(cut.order))
                upcoming = (self._request(follower, cut.order) for follower in followers)
                self._put(*self._fetcher.receive(wanted, filter(None, upcoming)))

    def _request(self, unit: Unit, order: Tensor | PassOrder) -> FetchRequest | None:
        """The request for the missing samples of a block; None if there are none."""
        missing = self._absent(order[unit.first : unit.end])
        return FetchRequest(("kept", unit), missing) if missing else None

    def _put(self, indices: Sequence[int], samples: Sequence[Any]) -> None:
        """Keep missing samples.

        Raises:
            UnevenError: A sample is of another kind than the first.
        """
        if any(kind(sample) != self._kind for sample in samples):
            raise UnevenError
        leaves = pytree.tree_leaves(default_collate(list(samples)))
        at = torch.tensor(indices, dtype=torch.int64, device="cpu")
        there = at.to(self._device)
        self._stream_sync.wait()
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.index_copy_(0, there, _bits(leaf).to(self._device, non_blocking=True))
        self._stream_sync.written()
        self._missing -= int((~self._there[at]).sum())
        self._there[at] = True


def _has_rows(leaf: Any) -> bool:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided:
        return False
    return leaf.is_contiguous() and not leaf.requires_grad and not leaf.is_quantized


def _bits(leaf: Tensor) -> Tensor:
    return leaf.view(_AS_INTEGERS.get(leaf.dtype.itemsize, leaf.dtype))
