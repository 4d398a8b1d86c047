"""Batch source that holds samples only while lanes in lockstep need them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.core.trial import derive_seed
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.generators import seed_all
from shoal.train.data.fetch import Fetcher
from shoal.train.data.iterable import PassOrder
from shoal.train.data.loader_processes import FetchRequest
from shoal.train.data.samples import compact, has_graph, is_copyable, views_larger_memory
from shoal.train.data.source import BLOCK, BatchRequest, BatchSource, HostToDevice, StreamSync, Unit, blocks

__all__ = ["SampleWindow"]

_Place = tuple[int | None, int, list[int]]
"""Seed of an iterator, position of a batch's first sample in its order, and indices of the batch's samples."""


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
