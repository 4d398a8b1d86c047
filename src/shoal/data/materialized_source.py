"""Batch source that decodes each sample of a data set once and keeps it on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.core.demand import Sharing
from shoal.data.fetch import Fetcher
from shoal.data.iterable import PassOrder
from shoal.data.loader_processes import FetchRequest
from shoal.data.samples import sample_kind
from shoal.data.source import BatchRequest, BatchSource, SampleKindError, StreamSync
from shoal.data.unit import BLOCK, Unit, blocks

__all__ = ["MaterializedSource", "materialized_bytes"]

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size in bytes -> integer dtype of this size. Samples are stored as integers, since not all dtypes can be
indexed."""


def materialized_bytes(batch: Any, rows: int, samples: int) -> int | None:
    """Return the bytes that a whole data set takes on the device.

    Args:
        batch: A collated batch of some of its samples.
        rows: Number of samples in the batch.
        samples: Number of samples in the data set.

    Returns:
        The bytes; None if the batch does not consist of dense tensors.
    """
    leaves = pytree.tree_leaves(batch)
    if not all(map(_is_dense_leaf, leaves)):
        return None
    held: int = sum(leaf.nbytes for leaf in leaves)
    return held * samples // rows


class MaterializedSource(BatchSource):
    """Keeps all samples on the device; for data sets without random numbers whose samples are all of one kind.

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
        self._kind = sample_kind(first[0])
        leaves, self._spec = pytree.tree_flatten(default_collate(list(first)))
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._tensors = [
            torch.empty((samples, *leaf.shape[1:]), dtype=_as_indexable(leaf).dtype, device=device) for leaf in leaves
        ]
        self._present = torch.zeros(samples, dtype=torch.bool, device="cpu")
        self._missing = samples
        self._stream_sync = StreamSync(device)

    @property
    def pending_bytes(self) -> int:
        """Bytes of host memory that missing samples will take; 0 on a GPU, whose memory is allocated at the start."""
        if self._device.type != "cpu":
            return 0
        return sum(column.nbytes for column in self._tensors) * self._missing // len(self._present)

    def batch(self, request: BatchRequest) -> Any:
        """Return the batch; missing samples are fetched first.

        Raises:
            RandomSampleError: Fetching drew random numbers.
            SampleKindError: A sample is of another kind than the first.
        """
        if self._missing and (missing := self._missing_indices(request.indices)):
            if request.seed is None or not self._fetcher.prefetch_limit:
                self._store(missing, self._fetcher.fetch_deterministic(missing))
            else:
                self._fetch_blocks(request, request.seed)
        self._stream_sync.prepare_read(self._tensors)
        rows = (column.index_select(0, request.device_indices) for column in self._tensors)
        leaves = [bits.view(dtype) for bits, dtype in zip(rows, self._dtypes, strict=True)]
        return pytree.tree_unflatten(leaves, self._spec)

    def release(self) -> None:
        """Drop the samples that loader processes have fetched in advance; stored samples are kept."""
        self._fetcher.drop_prefetched()

    def _missing_indices(self, at: Tensor) -> list[int]:
        """Return those of the indices whose samples are missing, without duplicates."""
        return list(dict.fromkeys(at[~self._present[at]].tolist()))

    def _fetch_blocks(self, request: BatchRequest, seed: int) -> None:
        """Store the samples of a batch from the loader processes, and request the next blocks in advance."""
        for unit in blocks(seed, request.first, request.first + len(request.indices), len(request.order)):
            if (wanted := self._request(unit, request.order)) is not None:
                next_units = unit.next_units(self._fetcher.prefetch_limit * BLOCK, len(request.order))
                upcoming = (self._request(follower, request.order) for follower in next_units)
                self._store(*self._fetcher.fetch_in_workers(wanted, filter(None, upcoming)))

    def _request(self, unit: Unit, order: Tensor | PassOrder) -> FetchRequest | None:
        """Return the request for the missing samples of a block; None if there are none."""
        missing = self._missing_indices(order[unit.first : unit.end])
        return FetchRequest(("kept", unit), missing) if missing else None

    def _store(self, indices: Sequence[int], samples: Sequence[Any]) -> None:
        """Store missing samples."""
        if any(sample_kind(sample) != self._kind for sample in samples):
            raise SampleKindError
        leaves = pytree.tree_leaves(default_collate(list(samples)))
        at = torch.tensor(indices, dtype=torch.int64, device="cpu")
        there = at.to(self._device)
        self._stream_sync.wait_for_writes()
        for column, leaf in zip(self._tensors, leaves, strict=True):
            column.index_copy_(0, there, _as_indexable(leaf).to(self._device, non_blocking=True))
        self._stream_sync.record_write()
        self._missing -= int((~self._present[at]).sum())
        self._present[at] = True


def _is_dense_leaf(leaf: Any) -> bool:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided:
        return False
    return leaf.is_contiguous() and not leaf.requires_grad and not leaf.is_quantized


def _as_indexable(leaf: Tensor) -> Tensor:
    return leaf.view(_AS_INTEGERS.get(leaf.dtype.itemsize, leaf.dtype))
