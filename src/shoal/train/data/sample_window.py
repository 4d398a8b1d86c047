"""Batch source that holds samples only while lanes in lockstep need them, and the fetching of samples."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from shoal.core.trial import derive_seed
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.generators import DrawDetector, PythonRngSnapshot, seed_all
from shoal.fuse.rows import bytes_of
from shoal.train.data.iterable import IterableReader, PassOrder
from shoal.train.data.loader_processes import FetchRequest, LoaderProcesses
from shoal.train.data.samples import compact, copy_sample, has_graph, is_copyable, samples_equal, views_larger_memory
from shoal.train.data.source import (
    BLOCK,
    BatchRequest,
    BatchSource,
    HostToDevice,
    RandomSampleError,
    StreamSync,
    Unit,
    blocks,
)

__all__ = ["Fetcher", "SampleWindow"]

MAX_PREFETCH_SECONDS, MAX_PREFETCH_BYTES = 0.05, 16 << 20
"""Maximum seconds and bytes of samples that are fetched in advance. Steps that follow one another without fetching in
between find warm caches. But training waits while samples are fetched, and may end without using them."""

_Place = tuple[int | None, int, list[int]]
"""Seed of an iterator, position of a batch's first sample in its order, and indices of the batch's samples."""


class Fetcher:
    """Fetches the samples of a data set.

    Args:
        dataset: Data set with a length and indices, or the reader of an iterable one.
        device: Device whose generator is checked for draws, in addition to the generators of the CPU.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | IterableReader,
        device: torch.device,
        processes: LoaderProcesses | None = None,
    ) -> None:
        self._processes = processes
        self._request_numbers = count()
        self._dataset = dataset
        self._device = device
        self.fetched = 0
        """Number of samples fetched, except by `probe`."""
        self.seconds = 0.0
        """Wall time of fetching these samples, in seconds; with loader processes, of waiting for them."""
        self.cpu_seconds = 0.0
        """CPU time of fetching them; with loader processes, which compute meanwhile, the wall time."""

    @property
    def prefetch_limit(self) -> int:
        """Number of units that loader processes fetch in advance; 0 if there are none."""
        return 0 if self._processes is None else self._processes.prefetch_limit

    def fetch_in_workers(
        self, wanted: FetchRequest, upcoming: Iterable[FetchRequest] = ()
    ) -> tuple[Sequence[int], Any]:
        """Fetch samples in the loader processes; see `LoaderProcesses.get`."""
        assert self._processes is not None
        began = time.perf_counter()
        indices, value = self._processes.get(wanted, upcoming)
        waited = time.perf_counter() - began
        self.seconds += waited
        self.cpu_seconds += waited
        self.fetched += len(indices)
        return indices, value

    def drop_prefetched(self) -> None:
        """Drop the samples that loader processes have fetched in advance."""
        if self._processes is not None:
            self._processes.drop_prefetched()

    def _fetch_once_in_workers(
        self, indices: Iterable[int], random_samples: bool = False, check_repeatable: bool = False
    ) -> Any:
        """Fetch samples that belong to no unit in the loader processes."""
        wanted = FetchRequest(
            ("single", next(self._request_numbers)),
            tuple(indices),
            random_samples=random_samples,
            check_repeatable=check_repeatable,
        )
        return self.fetch_in_workers(wanted)[1]

    def fetch(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples, in order."""
        if self._processes is not None:
            received: list[Any] = self._fetch_once_in_workers(indices, random_samples=True)
            return received
        began, cpu = time.perf_counter(), time.process_time()
        if isinstance(self._dataset, IterableReader):
            samples = self._dataset.read(list(indices))
        else:
            samples = [self._dataset[i] for i in indices]
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu
        self.fetched += len(samples)
        return samples

    def fetch_deterministic(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples of a data set that draws no random numbers; else raise RandomSampleError."""
        if self._processes is not None:
            received: list[Any] = self._fetch_once_in_workers(indices)
            return received
        if isinstance(self._dataset, IterableReader):  # the reader restores the generators
            return self.fetch(indices)
        torchs, others = DrawDetector(self._device), PythonRngSnapshot()
        samples = self.fetch(indices)
        if torchs() or others.has_drawn():
            torchs.restore()
            others.restore()
            raise RandomSampleError
        return samples

    def prefetch_count(self, sample: Any) -> int:
        """Return the number of samples like this one to fetch in advance.

        It is 0 for a GPU, which computes meanwhile, for loader processes, which prefetch, and for samples with a graph.
        """
        if self.prefetch_limit or self._device.type != "cpu" or has_graph(sample):
            return 0
        leaves = pytree.tree_leaves(sample)
        size = bytes_of(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        size += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, (np.ndarray, np.generic)))
        each = self.seconds / self.fetched
        return int(min(MAX_PREFETCH_SECONDS / max(each, 1e-6), MAX_PREFETCH_BYTES / max(size, 1024)))

    def probe(self, indices: Sequence[int]) -> tuple[list[Any], bool]:
        """As `fetch_deterministic`, uncounted; also return whether samples in a row equal those fetched singly."""
        before = self.fetched, self.seconds, self.cpu_seconds
        try:
            if self._processes is not None:
                found: tuple[list[Any], bool] = self._fetch_once_in_workers(indices, check_repeatable=True)
                return found
            one_by_one = [copy_sample(*self.fetch_deterministic((index,))) for index in indices]
            samples = self.fetch_deterministic(indices)
            return samples, all(map(samples_equal, one_by_one, samples))
        finally:
            self.fetched, self.seconds, self.cpu_seconds = before


class SampleWindow(BatchSource):
    """Holds the most recent units (blocks or batches of samples) of a data set for lanes that need them next.

    A unit is a block of samples, of which lanes of any batch size take slices; or, if the random numbers of samples
    depend on their batch, this batch, for lanes of the same size. With random samples, generators are seeded for each
    unit. Since the lane furthest behind always steps next, lanes are apart by at most the largest batch. So twice this
    number of samples is held, plus the samples that were fetched in advance.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        device: torch.device,
        random_samples: bool = False,
        batch_units: bool = False,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.sample_sharing = "batch" if batch_units else "window"
        self._fetcher = fetcher
        self._device = device
        self._random_samples = random_samples
        self._batch_units = batch_units
        self._collate = collate
        self._units: OrderedDict[Unit, Any] = OrderedDict()
        self._prefetched: set[Unit] = set()  # units that no batch has needed yet
        self._has_graph = False  # samples have autograd graphs, so none are held
        self._stream_sync = StreamSync(device)
        self._copy = HostToDevice(device)
        self._last_batch = _LastBatchCache(self._stream_sync)

    @property
    def prefetched(self) -> int:
        """Number of samples in units that no batch has needed yet."""
        return sum(unit.samples for unit in self._prefetched)

    def batch(self, request: BatchRequest) -> Any:
        """Return the batch; missing units are fetched first. If the request has no seed, no samples are shared."""
        indices = request.indices.tolist()
        if request.seed is None or self._has_graph:
            fetch = self._fetcher.fetch if self._random_samples else self._fetcher.fetch_deterministic
            return self._collate_to_device(fetch(indices))
        end = request.first + len(indices)
        if self._batch_units:
            return self._batch_from_unit(request, Unit(request.seed, request.number, request.first, end))
        if (newest := self._last_batch.take(request, indices)) is not None:
            return newest
        units = blocks(request.seed, request.first, end, len(request.order))
        self._ensure_units(request, units)
        samples = [sample for unit in units for sample in self._units[unit]]
        samples = samples[request.first % BLOCK :][: len(indices)]
        self._stream_sync.prepare_read(samples)
        batch = self._collate_to_device(samples)
        unneeded = self._last_batch.offer(request, indices, batch)
        if has_graph(batch):  # an autograd graph can be used only once
            self._drop(units)
            self._has_graph = not self._random_samples
        elif unneeded:
            self._drop(unit for unit in units if unit.end <= end)
        return batch

    def _batch_from_unit(self, request: BatchRequest, unit: Unit) -> Any:
        self._ensure_units(request, [unit])
        batch = self._units[unit]
        self._stream_sync.prepare_read(batch)
        if is_copyable(batch):
            return lazy_clone(batch)
        self._drop([unit])
        return batch

    def _ensure_units(self, request: BatchRequest, units: Sequence[Unit]) -> None:
        """Fetch those of the units that are missing. If there are any, also fetch some units in advance."""
        self._prefetched.difference_update(units)
        missing = [unit for unit in units if unit not in self._units]
        if not missing:
            return
        self._stream_sync.wait_for_writes()
        made, prefetched = {}, 0
        for unit, samples in self._fetch(request.order, missing):
            made[unit] = self._prepare_unit(samples)
            if not self._fetcher.prefetch_limit and not (self._batch_units and not is_copyable(made[unit])):
                prefetched = self._fetcher.prefetch_count(samples[0])
        self._units.update(made)
        self._prefetch(request.order, units[-1].next_units(prefetched, len(request.order)))
        for unit in units:
            self._units.move_to_end(unit)
        self._stream_sync.record_write()
        if self._batch_units:
            self._evict(request.window_samples // 2 + request.iterators * prefetched)
        else:
            seeds = len({unit.seed for unit in self._units})
            self._evict(
                _round_up(request.window_samples)
                + 2 * request.iterators * BLOCK
                + seeds * (prefetched // BLOCK * BLOCK)
            )

    def _prefetch(self, order: Tensor | PassOrder, units: Iterable[Unit]) -> None:
        try:
            for unit, samples in self._fetch(order, [unit for unit in units if unit not in self._units]):
                self._units[unit] = self._prepare_unit(samples)
                self._prefetched.add(unit)
        except (Exception, SystemExit):  # it is raised again when the samples are needed
            return

    def _fetch(self, order: Tensor | PassOrder, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Any]]]:
        """Yield units with their samples, or with the batch that loader processes have collated.

        If samples draw random numbers, each unit is fetched when the iterator reaches it.
        """
        if self._fetcher.prefetch_limit:
            for unit in units:
                next_units = unit.next_units(self._fetcher.prefetch_limit * unit.samples, len(order))
                upcoming = (self._request(each, order) for each in next_units if each not in self._units)
                yield unit, self._fetcher.fetch_in_workers(self._request(unit, order), upcoming)[1]
            return
        indices = {unit: order[unit.first : unit.end].tolist() for unit in units}
        if not indices:
            return
        if not self._random_samples:
            samples = iter(self._fetcher.fetch_deterministic(chain(*indices.values())))
            yield from ((unit, list(islice(samples, unit.samples))) for unit in indices)
            return
        for unit, some in indices.items():
            seed_all(self._seed(unit), self._device)
            yield unit, self._fetcher.fetch(some)

    def _seed(self, unit: Unit) -> int:
        return unit.seed + unit.number if self._batch_units else derive_seed(unit.seed, "block", unit.number)

    def _request(self, unit: Unit, order: Tensor | PassOrder) -> FetchRequest:
        indices = order[unit.first : unit.end].tolist()
        seed = self._seed(unit) if self._random_samples else None
        return FetchRequest(
            (unit, self._random_samples, self._batch_units), indices, seed, self._random_samples, self._batch_units
        )

    def _prepare_unit(self, samples: list[Any]) -> Any:
        if self._batch_units:
            return (
                self._to_device(compact(samples)) if self._fetcher.prefetch_limit else self._collate_to_device(samples)
            )
        return list(map(compact, samples)) if any(map(views_larger_memory, samples)) else samples

    def _collate_to_device(self, samples: list[Any]) -> Any:
        return self._to_device(self._collate(samples))

    def _to_device(self, batch: Any) -> Any:
        leaves = pytree.tree_leaves(batch)
        if all(leaf.device == self._device for leaf in leaves if isinstance(leaf, Tensor)):
            return batch
        return self._copy(batch)

    def _evict(self, most: int) -> None:
        """Drop the oldest units until at most `most` samples are held."""
        held = sum(unit.samples for unit in self._units)
        while held > most:
            unit, _ = self._units.popitem(last=False)
            self._prefetched.discard(unit)
            held -= unit.samples

    def _drop(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._units.pop(unit, None)

    def release(self) -> None:
        """Drop all units."""
        self._units.clear()
        self._prefetched.clear()
        self._last_batch.clear()
        self._fetcher.drop_prefetched()


class _LastBatchCache:
    """Keeps the last batch for other lanes of its batch size, and determines whether its samples are still needed."""

    def __init__(self, stream_sync: StreamSync) -> None:
        self._stream_sync = stream_sync
        self._entry: tuple[_Place, Any, int] | None = None  # position, batch, number of lanes that still need it
        self._last: tuple[int | None, int] | None = None  # seed and position of the last batch

    def take(self, request: BatchRequest, indices: list[int]) -> Any | None:
        """Return the cached batch if requested, else None; its last consumer gets the original, others a copy."""
        if self._entry is None or self._entry[0] != (request.seed, request.first, indices):
            return None
        place, batch, wanted = self._entry
        self._stream_sync.prepare_read(batch)
        self._entry = (place, batch, wanted - 1) if wanted > 1 else None
        return lazy_clone(batch) if wanted > 1 else batch

    def offer(self, request: BatchRequest, indices: list[int], batch: Any) -> bool:
        last, self._last = self._last, (request.seed, request.first)
        if request.iterators == 1:  # the lanes that needed the cached batch have left
            self._entry = None
        goes_on = last is not None and last[0] == request.seed is not None and last[1] != request.first
        unneeded = goes_on and request.same_size_iterators == request.iterators and self._entry is None
        if request.same_size_iterators > 1:
            if not is_copyable(batch):
                return False
            self._entry = (request.seed, request.first, indices), lazy_clone(batch), request.same_size_iterators - 1
            self._stream_sync.record_write()
        return unneeded

    def clear(self) -> None:
        self._entry = self._last = None


def _round_up(samples: int) -> int:
    return -(-samples // BLOCK) * BLOCK
