"""Batches of a data set that draws: what a sample draws belongs to the batch it is fetched in."""

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch.utils.data import default_collate

from shoal.cost.demand import Sharing
from shoal.fuse.generators import reseed
from shoal.fuse.lazy import lazily_copied
from shoal.pack.fetch import Fetcher
from shoal.pack.samples import plain
from shoal.pack.source import Cut, Source
from shoal.pack.streams import Handover
from shoal.pack.window import moved

__all__ = ["Whole"]


class Whole(Source):
    """Whole batches, held for lanes of the same batch size: as many as walks are under way, the last at least.

    Args:
        fetcher: of the data set.
        device: where batches go.
    """

    sharing: ClassVar[Sharing] = "batch"

    def __init__(self, fetcher: Fetcher, device: torch.device) -> None:
        self._fetcher = fetcher
        self._device = device
        self._held: OrderedDict[tuple[int, tuple[int, ...]], Any] = OrderedDict()
        self._handover = Handover(device)

    def batch(self, cut: Cut) -> Any:
        """The batch, fetched with its own seed unless it was just made for another lane."""
        indices = tuple(cut.at.tolist())
        if cut.seed is None:
            return moved(default_collate(self._fetcher.fetch(indices)), self._device)
        key = (cut.seed + cut.number, indices)
        if key in self._held:
            self._handover.read(self._held[key])
            return lazily_copied(self._held[key])
        reseed(cut.seed + cut.number, self._device)
        batch = moved(default_collate(self._fetcher.fetch(indices)), self._device)
        if plain(batch):
            self._held[key] = lazily_copied(batch)
            self._handover.written()
            while len(self._held) > cut.walks:
                self._held.popitem(last=False)
        return batch

    def rest(self) -> None:
        """Nobody is abreast of anybody."""
        self._held.clear()
