"""Batches of a data set whose samples are held only while lanes that keep abreast need them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.core.trial import derive_seed
from shoal.data.fetch import Fetcher
from shoal.data.iterable import PassOrder
from shoal.data.processes import FetchRequest
from shoal.data.samples import attached, bulky, compact, plain
from shoal.data.source import BatchRequest, BatchSource, StreamSync
from shoal.data.unit import BLOCK, Unit, blocks
from shoal.fuse.copy_on_write import lazy_clone
from shoal.fuse.generators import seed_all

__all__ = ["SampleWindow"]

_Place = tuple[int | None, int, list[int]]
"""Seed of a walk, place of a batch's first sample in it, and indices of the batch's samples."""


class SampleWindow(BatchSource):
    """Holds the last few units (blocks or batches of samples) of a data set, for lanes that need them next.

    If samples draw no random numbers, or by their places in the order, a unit is a block of samples as they were
    fetched: lanes cut batches of any size out of blocks. If samples draw by their batch, a unit is that batch, for
    lanes of the same batch size. Since the lane furthest behind always goes next, lanes are apart by at most the
    largest batch. So twice that is held, and what is fetched in advance.

    Args:
        fetcher: Fetcher of the data set.
        device: Device of the batches.
        draws: Whether samples draw. Generators are then seeded for each unit, by the walk's seed and the unit's number.
        whole: Whether a unit is a batch.
        collate: Makes a batch of samples.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        device: torch.device,
        draws: bool = False,
        whole: bool = False,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.sharing = "batch" if whole else "window"
        self._fetcher = fetcher
        self._device = device
        self._draws = draws
        self._whole = whole
        self._collate = collate
        self._held: OrderedDict[Unit, Any] = OrderedDict()
        self._early: set[Unit] = set()  # of these, units that no batch has needed yet
        self._attached = False  # samples have autograd graphs: none is held any more
        self._stream_sync = StreamSync(device)
        self._newest = _LastBatchCache(self._stream_sync)

    @property
    def early(self) -> int:
        """Number of samples in units that no batch has needed yet."""
        return sum(unit.samples for unit in self._early)

    def batch(self, cut: BatchRequest) -> Any:
        """The batch; missing units are fetched first. Without a seed no samples are shared.

        Raises:
            DrawsError: Fetching drew random numbers, of a data set that had drawn none.
        """
        indices = cut.at.tolist()
        if cut.seed is None or self._attached:
            fetch = self._fetcher.fetch if self._draws else self._fetcher.fetch_undrawn
            return self._collated(fetch(indices))
        end = cut.first + len(indices)
        if self._whole:
            return self._whole_batch(cut, Unit(cut.seed, cut.number, cut.first, end))
        if (newest := self._newest.take(cut, indices)) is not None:
            return newest
        units = blocks(cut.seed, cut.first, end, len(cut.order))
        self._have(cut, units)
        samples = [sample for unit in units for sample in self._held[unit]]
        samples = samples[cut.first % BLOCK :][: len(indices)]
        self._stream_sync.read(samples)
        batch = self._collated(samples)
        alone = self._newest.hand_on(cut, indices, batch)
        if attached(batch):  # an autograd graph can be used only once
            self._drop(units)
            self._attached = not self._draws
        elif alone:
            self._drop(unit for unit in units if unit.end <= end)
        return batch

    def _whole_batch(self, cut: BatchRequest, unit: Unit) -> Any:
        self._have(cut, [unit])
        batch = self._held[unit]
        self._stream_sync.read(batch)
        if plain(batch):
            return lazy_clone(batch)
        self._drop([unit])
        return batch

    def _have(self, cut: BatchRequest, units: Sequence[Unit]) -> None:
        """Hold these units; if one is missing, also fetch some in advance."""
        self._early.difference_update(units)
        missing = [unit for unit in units if unit not in self._held]
        if not missing:
            return
        self._stream_sync.wait()
        made, early = {}, 0
        for unit, samples in self._fetch(cut.order, missing):
            made[unit] = self._kept(samples)
            if not self._fetcher.ahead and not (self._whole and not plain(made[unit])):
                early = self._fetcher.most_early(samples[0])
        self._held.update(made)
        self._hold_early(cut.order, units[-1].followers(early, len(cut.order)))
        for unit in units:
            self._held.move_to_end(unit)
        self._stream_sync.written()
        if self._whole:
            self._let_go(cut.held // 2 + cut.walks * early)
        else:
            seeds = len({unit.seed for unit in self._held})
            self._let_go(_filled(cut.held) + 2 * cut.walks * BLOCK + seeds * (early // BLOCK * BLOCK))

    def _hold_early(self, order: Tensor | PassOrder, units: Iterable[Unit]) -> None:
        """Hold units in advance."""
        try:
            for unit, samples in self._fetch(order, [unit for unit in units if unit not in self._held]):
                self._held[unit] = self._kept(samples)
                self._early.add(unit)
        except (Exception, SystemExit):  # not hidden: it is raised again when the samples are needed
            return

    def _fetch(self, order: Tensor | PassOrder, units: Iterable[Unit]) -> Iterator[tuple[Unit, list[Any]]]:
        """Units with their samples; if samples draw, each unit is fetched when the iterator reaches it.

        If a unit is a batch and there are loader processes, they have made the batch.
        """
        if self._fetcher.ahead:
            for unit in units:
                followers = unit.followers(self._fetcher.ahead * unit.samples, len(order))
                upcoming = (self._request(each, order) for each in followers if each not in self._held)
                yield unit, self._fetcher.receive(self._request(unit, order), upcoming)[1]
            return
        indices = {unit: order[unit.first : unit.end].tolist() for unit in units}
        if not indices:
            return
        if not self._draws:
            samples = iter(self._fetcher.fetch_undrawn(chain(*indices.values())))
            yield from ((unit, list(islice(samples, unit.samples))) for unit in indices)
            return
        for unit, some in indices.items():
            seed_all(self._seed(unit), self._device)
            yield unit, self._fetcher.fetch(some)

    def _seed(self, unit: Unit) -> int:
        """The seed of samples that draw."""
        return unit.seed + unit.number if self._whole else derive_seed(unit.seed, "block", unit.number)

    def _request(self, unit: Unit, order: Tensor | PassOrder) -> FetchRequest:
        """The request for a unit to the loader processes."""
        indices = order[unit.first : unit.end].tolist()
        seed = self._seed(unit) if self._draws else None
        return FetchRequest((unit, self._draws, self._whole), indices, seed, self._draws, self._whole)

    def _kept(self, samples: list[Any]) -> Any:
        """A unit in the form in which it is held."""
        if self._whole:
            return self._moved(compact(samples)) if self._fetcher.ahead else self._collated(samples)
        return list(map(compact, samples)) if any(map(bulky, samples)) else samples

    def _collated(self, samples: list[Any]) -> Any:
        """Samples as a batch on the device."""
        return self._moved(self._collate(samples))

    def _moved(self, batch: Any) -> Any:
        """A batch on the device."""
        leaves = pytree.tree_leaves(batch)
        if all(leaf.device == self._device for leaf in leaves if isinstance(leaf, Tensor)):
            return batch
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), batch)

    def _let_go(self, most: int) -> None:
        """Drop all units but the newest with up to `most` samples."""
        held = sum(unit.samples for unit in self._held)
        while held > most:
            unit, _ = self._held.popitem(last=False)
            self._early.discard(unit)
            held -= unit.samples

    def _drop(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._held.pop(unit, None)

    def rest(self) -> None:
        """Drop all units."""
        self._held.clear()
        self._early.clear()
        self._newest.forget()
        self._fetcher.forget()


class _LastBatchCache:
    """Keeps the last batch for other lanes of its batch size, and finds out whether its samples are needed any more.

    Args:
        stream_sync: Synchronisation of the tensors that are kept.
    """

    def __init__(self, stream_sync: StreamSync) -> None:
        self._stream_sync = stream_sync
        self._kept: tuple[_Place, Any, int] | None = None  # a batch with its place, and how many lanes still need it
        self._last: tuple[int | None, int] | None = None  # walk's seed and place of the last batch

    def take(self, cut: BatchRequest, indices: list[int]) -> Any | None:
        """The batch, if it is the last one; the last lane that needs it gets the original, others a copy."""
        if self._kept is None or self._kept[0] != (cut.seed, cut.first, indices):
            return None
        place, batch, wanted = self._kept
        self._stream_sync.read(batch)
        self._kept = (place, batch, wanted - 1) if wanted > 1 else None
        return lazy_clone(batch) if wanted > 1 else batch

    def hand_on(self, cut: BatchRequest, indices: list[int], batch: Any) -> bool:
        """Keep a batch for the other lanes of its batch size.

        Returns:
            Whether its samples are not needed any more: all walks have its batch size and have taken the batch before.
            In the first batch of an epoch, other lanes may have yet to begin.
        """
        last, self._last = self._last, (cut.seed, cut.first)
        if cut.walks == 1:  # the lanes that needed it have gone
            self._kept = None
        goes_on = last is not None and last[0] == cut.seed is not None and last[1] != cut.first
        alone = goes_on and cut.alike == cut.walks and self._kept is None
        if cut.alike > 1:
            if not plain(batch):
                return False
            self._kept = (cut.seed, cut.first, indices), lazy_clone(batch), cut.alike - 1
            self._stream_sync.written()
        return alone

    def forget(self) -> None:
        """Drop the batch."""
        self._kept = self._last = None


def _filled(samples: int) -> int:
    """A number of samples, rounded up to whole blocks."""
    return -(-samples // BLOCK) * BLOCK
