"""Batches of a data set on a device, in several batch sizes at once, shared by all trials of a process.

A data set whose samples fit in memory is decoded once and kept on the device.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from shoal.core.demand import LOCKSTEP, SampleSharing
from shoal.core.errors import TaskError
from shoal.fuse.generators import PythonRngSnapshot, forked_rng
from shoal.fuse.rows import unstackable
from shoal.train.data.iterable import IterableReader, PassOrder
from shoal.train.data.loader import LoaderSettings, is_iterable
from shoal.train.data.loader_processes import FetchRequest, LoaderProcesses
from shoal.train.data.sample_window import Fetcher, SampleWindow
from shoal.train.data.samples import sample_kind
from shoal.train.data.source import (
    BLOCK,
    BatchRequest,
    BatchSource,
    HostToDevice,
    RandomSampleError,
    SampleKindError,
    StreamSync,
    Unit,
    blocks,
)

__all__ = ["Batches", "MaterializedSource", "materialized_bytes"]

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size in bytes -> integer dtype of this size. Samples are stored as integers, since not all dtypes can be
indexed."""

_log = logging.getLogger("shoal.pack")

RESIDENT_BYTES = 1 << 30
"""Maximum size in bytes of a data set that is kept on the device as a whole."""

BATCHES_PER_SPLIT = 256
"""Number of batches whose indices are split in one call."""

PROBED_SAMPLES = 8
"""Number of samples, from the start of the data set, that are fetched to choose a batch source."""

_DEFAULT_SETTINGS = LoaderSettings()


def materialized_bytes(batch: Any, rows: int, samples: int) -> int | None:
    """Return the bytes of a whole data set on the device; None if its batch is not of dense tensors."""
    leaves = pytree.tree_leaves(batch)
    if not all(map(_is_dense_leaf, leaves)):
        return None
    held: int = sum(leaf.nbytes for leaf in leaves)
    return held * samples // rows


class MaterializedSource(BatchSource):
    """Keeps all samples on the device; for data sets without random numbers whose samples are all of one kind."""

    sample_sharing: SampleSharing = "kept"

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
        self._copy = HostToDevice(device)

    @property
    def pending_bytes(self) -> int:
        """Bytes of host memory that missing samples will take; 0 on a GPU, whose memory is allocated at the start."""
        if self._device.type != "cpu":
            return 0
        return sum(column.nbytes for column in self._tensors) * self._missing // len(self._present)

    def batch(self, request: BatchRequest) -> Any:
        """Return the batch; missing samples are fetched first, and must be of the kind of the first, without draws."""
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
        if any(sample_kind(sample) != self._kind for sample in samples):
            raise SampleKindError
        leaves = pytree.tree_leaves(default_collate(list(samples)))
        at = torch.tensor(indices, dtype=torch.int64, device="cpu")
        there, *moved = self._copy([at, *map(_as_indexable, leaves)])
        self._stream_sync.wait_for_writes()
        for column, leaf in zip(self._tensors, moved, strict=True):
            column.index_copy_(0, there, leaf)
        self._stream_sync.record_write()
        self._missing -= int((~self._present[at]).sum())
        self._present[at] = True


def _is_dense_leaf(leaf: Any) -> bool:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided:
        return False
    return leaf.is_contiguous() and not leaf.requires_grad and not leaf.is_quantized


def _as_indexable(leaf: Tensor) -> Tensor:
    return leaf.view(_AS_INTEGERS.get(leaf.dtype.itemsize, leaf.dtype))


class Batches:
    """Cuts a data set into batches on a device. A batch does not depend on other iterators over the data set.

    A small tensor data set moves to the device as a whole, and a batch is one indexing operation. Samples of other data
    sets are fetched one by one and collated. The first samples decide how iterators share them:

    Those without random numbers that fit in `RESIDENT_BYTES` are kept on the device. Larger ones are held for iterators
    that advance in lockstep, as are those of an iterable data set. With random numbers, also of a user's `collate`,
    whole batches are held for iterators of the same batch size, unless numbers depend on positions
    (`shared_augmentation`).
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        name: str,
        shared_augmentation: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        settings: LoaderSettings = _DEFAULT_SETTINGS,
    ) -> None:
        self._reader = IterableReader(dataset, name) if is_iterable(dataset) else None
        if self._reader is not None:
            dataset = self._reader
        elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TaskError(
                f"the {name} set must have a length and indices, or an `__iter__` that begins anew at each call, got "
                f"{type(dataset).__name__}"
            )
        self.samples = settings.samples(dataset)
        self.batch_size = settings.batch_size
        """Batch size of the task's `DataLoader`; None if the task's `batch_size` determines it."""
        self._settings = settings
        self._rows = len(dataset)
        if self.samples == 0 or self._rows == 0:
            raise TaskError(f"the {name} set is empty; check what `data` of the task reads")
        self._device = device
        self._name = name
        self._shared_augmentation = shared_augmentation
        self._collate = collate
        self._source: BatchSource | None = None
        self._active_batch_sizes: list[int] = []  # one entry for each active iterator
        self._largest = 0
        self._resident: list[Tensor] | None = None
        tensors = None if collate is not None else _tensors(dataset)
        if tensors is not None and sum(tensor.nbytes for tensor in tensors) <= RESIDENT_BYTES:
            self._resident = [tensor.to(device) for tensor in tensors]
        processes = None
        if settings.num_workers and self._resident is None:
            processes = LoaderProcesses(dataset, collate or default_collate, name, settings)
        self._fetcher = Fetcher(dataset, device, processes)

    @property
    def endless(self) -> bool:
        """Whether the data set is iterable without a length, so that its passes follow one another."""
        return self._reader is not None and self._reader.endless

    @property
    def fetched(self) -> int:
        """Number of samples fetched so far, except those fetched to choose the batch source."""
        return self._fetcher.fetched

    @property
    def prefetched(self) -> int:
        """Number of fetched samples that no batch has needed yet."""
        return 0 if self._source is None else self._source.prefetched

    @property
    def fetch_seconds(self) -> float:
        """Wall time of fetching, in seconds."""
        return self._fetcher.seconds

    @property
    def fetch_cpu_seconds(self) -> float:
        """CPU time of fetching, in seconds."""
        return self._fetcher.cpu_seconds

    @property
    def sample_sharing(self) -> SampleSharing:
        """Method by which iterators share samples. Before the first batch, a few samples are fetched to choose it."""
        if self._resident is not None:
            return "resident"
        return self._current_source().sample_sharing

    @property
    def lockstep(self) -> bool:
        """Whether iterators share samples only while they are at the same position."""
        return self.sample_sharing in LOCKSTEP

    @property
    def pending_bytes(self) -> int:
        """Bytes of host memory that samples will take which are to be kept but have not been fetched."""
        source = None if self._resident is not None else self._current_source()
        return source.pending_bytes if isinstance(source, MaterializedSource) else 0

    def steps(self, batch_size: int) -> int:
        """Return the number of batches in one pass, at least one."""
        if not self._settings.drop_last:
            return math.ceil(self.samples / batch_size)
        if self.samples < batch_size:
            raise TaskError(
                f"the {self._name} loader drops its only batch: an epoch has {self.samples} samples, a batch "
                f"{batch_size}, and `drop_last` is True; make batches smaller, or the loader with drop_last=False"
            )
        return self.samples // batch_size

    def order(self, data_seed: int, epoch: int | None) -> Tensor | PassOrder | None:
        """Return the order of an epoch (None: of the validation set): indices, int64 [samples], or None if they ascend.

        For an iterable data set, these are the indices of one pass.
        """
        if self._reader is not None:
            return self._reader.order(data_seed, epoch)
        order = self._settings.indices(self.samples, data_seed, epoch)
        if order is not None and not 0 <= int(order.min()) <= int(order.max()) < self._rows:
            wrong = next(each for each in order.tolist() if not 0 <= each < self._rows)
            raise TaskError(
                f"the sampler of the {self._name} loader yields {wrong}, and the data set has the indices 0 to "
                f"{self._rows - 1}"
            )
        return order

    def iterate(
        self,
        batch_size: int,
        order: Tensor | PassOrder | None = None,
        first: int = 0,
        seed: int | None = None,
    ) -> Iterator[Any]:
        """Yield the batches of one pass.

        Args:
            first: Number of the first batch to yield; earlier ones are not read.
            seed: Seed for samples that draw random numbers, combined with the number of the batch, or with the
                positions of the samples if augmentation is shared. Iterators with equal seeds must have equal orders.
        """
        device_order: Tensor | PassOrder
        if isinstance(order, PassOrder):
            device_order = order
        else:
            if self._resident is not None:
                yield from self._iterate_resident(self._resident, batch_size, order, first)
                return
            order = torch.arange(self.samples, device="cpu") if order is None else order.cpu()
            order = order[: self.steps(batch_size) * batch_size]
            device_order = order.to(self._device)
        self._active_batch_sizes.append(batch_size)
        if self._reader is not None:
            self._reader.active_iterators = len(self._active_batch_sizes)
        self._largest = max(self._largest, batch_size)
        try:
            for number in range(first, self.steps(batch_size)):
                part = slice(number * batch_size, (number + 1) * batch_size)
                window_samples = 2 * max(self._largest, sum(self._active_batch_sizes))
                iterators, same_size = len(self._active_batch_sizes), self._active_batch_sizes.count(batch_size)
                yield self._batch(
                    BatchRequest(
                        order[part],
                        device_order[part],
                        number,
                        order,
                        part.start,
                        seed,
                        iterators,
                        same_size,
                        window_samples,
                    )
                )
        finally:
            self._active_batch_sizes.remove(batch_size)
            # The next iterator of an iterable data set may continue here; without the samples it would reread the pass.
            if not self._active_batch_sizes and self._source is not None and self._reader is None:
                self._source.release()

    def _iterate_resident(
        self,
        tensors: list[Tensor],
        batch_size: int,
        order: Tensor | None,
        first: int,
    ) -> Iterator[Any]:
        end = min(self.samples, self.steps(batch_size) * batch_size)
        # Copies: in-place changes of a batch must not reach the data.
        if order is None:
            for number in range(first, self.steps(batch_size)):
                part = slice(number * batch_size, (number + 1) * batch_size)
                yield [tensor[part].clone() for tensor in tensors]
        else:
            order = order[:end].to(self._device)
            for start in range(first * batch_size, end, BATCHES_PER_SPLIT * batch_size):
                for rows in torch.split(order[start : start + BATCHES_PER_SPLIT * batch_size], batch_size):
                    yield [tensor.index_select(0, rows) for tensor in tensors]

    def _batch(self, request: BatchRequest) -> Any:
        while True:
            try:
                return self._current_source().batch(request)
            except SampleKindError:
                self._source = SampleWindow(self._fetcher, self._device)
            except RandomSampleError:
                self._source = self._random_source()

    def _current_source(self) -> BatchSource:
        if self._source is None and (self._collate is not None or self._reader is not None):
            # The reader of an iterable data set seeds the generators for each pass.
            batch_units, collate = self._collate is not None, self._collate or default_collate
            self._source = SampleWindow(
                self._fetcher, self._device, random_samples=batch_units, batch_units=batch_units, collate=collate
            )
        elif self._source is None:
            self._source = self._probe_source(range(min(self._rows, PROBED_SAMPLES)))
        return self._source

    def _probe_source(self, indices: Sequence[int]) -> BatchSource:
        """Return the batch source for a data set with these first samples. All generators are restored."""
        others = PythonRngSnapshot()
        with forked_rng([torch.device(self._device).index or 0] if self._device.type == "cuda" else []):
            try:
                return self._choose_source(indices)
            except RandomSampleError:
                return self._random_source()
            finally:
                others.restore()

    def _choose_source(self, indices: Sequence[int]) -> BatchSource:
        samples, alike = self._fetcher.probe(indices)
        if not alike:
            _log.warning(
                "the %s set returns different samples for the same index, but draws nothing from the generators that "
                "are seeded: a trial may differ alone and in an array; draw from torch's default generator instead",
                self._name,
            )
            return self._random_source()
        size = None
        if all(sample_kind(sample) == sample_kind(samples[0]) for sample in samples):
            size = materialized_bytes(default_collate(samples), len(samples), self._rows)
        if size is None or size > RESIDENT_BYTES:
            return SampleWindow(self._fetcher, self._device)
        return MaterializedSource(self._fetcher, self._rows, samples[:1], self._device)

    def _random_source(self) -> BatchSource:
        return SampleWindow(self._fetcher, self._device, random_samples=True, batch_units=not self._shared_augmentation)


def _tensors(dataset: Dataset[Any]) -> list[Tensor] | None:
    """Return the dense tensors of a `TensorDataset`, or of a `Subset` of one; None for any other data set."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors) if not any(map(unstackable, dataset.tensors)) else None
    if type(dataset) is Subset and (whole := _tensors(dataset.dataset)) is not None:
        return [tensor[torch.as_tensor(dataset.indices)] for tensor in whole]
    return None
