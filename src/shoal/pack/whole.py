"""Batches of a data set that draws: what a sample draws belongs to the batch it is fetched in."""

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch.utils.data import default_collate

from shoal.core.demand import Sharing
from shoal.fuse.generators import reseed
from shoal.fuse.lazy import lazily_copied
from shoal.pack.fetch import Fetcher
from shoal.pack.samples import plain
from shoal.pack.source import Cut, Source
from shoal.pack.streams import Handover
from shoal.pack.window import moved

__all__ = ["Whole"]

_Key = tuple[int, tuple[int, ...]]
"""What the generators are seeded with for a batch, and the indices of its samples."""


class Whole(Source):
    """Whole batches, held for lanes of the same batch size: as many samples as all lanes take in a step, and what is
    fetched early.

    Args:
        fetcher: of the data set.
        device: where batches go.
    """

    sharing: ClassVar[Sharing] = "batch"

    def __init__(self, fetcher: Fetcher, device: torch.device) -> None:
        self._fetcher = fetcher
        self._device = device
        self._held: OrderedDict[_Key, Any] = OrderedDict()
        self._early: set[_Key] = set()  # of these, batches that nobody has asked for yet
        self._handover = Handover(device)

    @property
    def early(self) -> int:
        """In batches that nobody has asked for yet."""
        return sum(len(indices) for _, indices in self._early)

    def batch(self, cut: Cut) -> Any:
        """The batch, fetched with its own seed, unless it was made before."""
        indices = tuple(cut.at.tolist())
        if cut.seed is None:
            return moved(default_collate(self._fetcher.fetch(indices)), self._device)
        key = cut.seed + cut.number, indices
        self._early.discard(key)
        if key in self._held:
            self._handover.read(self._held[key])
            return lazily_copied(self._held[key])
        samples = self._fetched(key)
        batch = moved(default_collate(samples), self._device)
        if plain(batch):
            early = self._fetcher.most_early(samples[0])
            self._handover.wait()
            self._held[key] = lazily_copied(batch)
            self._make_early(cut, key, early)
            self._handover.written()
            self._let_go(cut.held // 2 + cut.walks * early)
        return batch

    def _fetched(self, key: _Key) -> list[Any]:
        seed, indices = key
        reseed(seed, self._device)
        return self._fetcher.fetch(indices)

    def _make_early(self, cut: Cut, newest: _Key, samples: int) -> None:
        """Make the batches that come next on a walk, of so many samples at most."""
        seed, indices = newest
        size = len(indices)
        after = cut.order[cut.first + size :][: samples // size * size]
        for number, first in enumerate(range(0, len(after), size), start=1):
            key = seed + number, tuple(after[first : first + size].tolist())
            if key not in self._held:
                try:
                    batch = moved(default_collate(self._fetched(key)), self._device)
                except (Exception, SystemExit):  # not hidden: it is raised when this batch is needed
                    return
                if not plain(batch):
                    return
                self._held[key] = batch
                self._early.add(key)

    def _let_go(self, samples: int) -> None:
        """Forget all batches but the newest, of so many samples."""
        held = sum(len(indices) for _, indices in self._held)
        while held > samples:
            key, _ = self._held.popitem(last=False)
            self._early.discard(key)
            held -= len(key[1])

    def rest(self) -> None:
        """Nobody is abreast of anybody."""
        self._held.clear()
        self._early.clear()
