"""Samples that are held for as long as lanes that keep abreast need them: decoded once in an epoch."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.core.demand import Sharing
from shoal.core.trial import derive_seed
from shoal.fuse.generators import OtherGenerators, reseed
from shoal.pack.fetch import Fetcher
from shoal.pack.newest import Newest
from shoal.pack.samples import attached, bulky, compact
from shoal.pack.source import Cut, Source
from shoal.pack.streams import Handover

__all__ = ["BLOCK", "Window", "moved"]

BLOCK = 32
"""Samples that follow each other in a walk and are fetched together: to seed the generators for each by itself takes
long beside decoding a small picture."""

_Key = tuple[int, int]
"""A walk's seed, which tells its order, and a block's number in it."""


class Window(Source):
    """The last few blocks of samples of a data set, as they were fetched, for who needs them next.

    Of lanes of which always the one furthest behind goes on, no two are ever further apart than the largest batch, so
    twice that is enough, and what is fetched early.

    Args:
        fetcher: of the data set.
        device: where batches go.
        seeds: generators that samples have drawn from so far. They are seeded for each block of a walk, by the walk's
            seed and the block's number; None where samples draw nothing. Where they draw from Python's or NumPy's as
            well, later on, what was just fetched is fetched again, and these are seeded from then on.
    """

    sharing: ClassVar[Sharing] = "window"

    def __init__(self, fetcher: Fetcher, device: torch.device, seeds: Literal["torch", "all"] | None = None) -> None:
        self._fetcher = fetcher
        self._device = device
        self._seeds = seeds
        self._held: OrderedDict[_Key, list[Any]] = OrderedDict()
        self._early: set[_Key] = set()  # of these, blocks that nobody has asked for yet
        self._attached = False  # graphs hang on samples that draw nothing: none is held any more
        self._handover = Handover(device)
        self._newest = Newest(self._handover)

    @property
    def early(self) -> int:
        """In blocks that nobody has asked for yet."""
        return sum(len(self._held[key]) for key in self._early)

    def batch(self, cut: Cut) -> Any:
        """The batch, after those blocks were fetched that are not held; without a seed, of samples of its own.

        Raises:
            DrawsError: that drew, and should not have.
        """
        indices = cut.at.tolist()
        if cut.seed is None or self._attached:
            fetch = self._fetcher.fetch_undrawn if self._seeds is None else self._fetcher.fetch
            return moved(default_collate(fetch(indices)), self._device)
        if (newest := self._newest.take(cut, indices)) is not None:
            return newest
        end = cut.first + len(indices)
        keys = [(cut.seed, number) for number in range(cut.first // BLOCK, _blocks(end))]
        self._have(cut, keys)
        samples = [sample for key in keys for sample in self._held[key]]
        samples = samples[cut.first % BLOCK :][: len(indices)]
        self._handover.read(samples)
        batch = moved(default_collate(samples), self._device)
        alone = self._newest.hand_on(cut, indices, batch)
        if attached(batch):  # a graph goes backward but once
            self._drop(keys)
            self._attached = self._seeds is None
        elif alone:
            self._drop((seed, number) for seed, number in keys if min((number + 1) * BLOCK, len(cut.order)) <= end)
        return batch

    def _have(self, cut: Cut, keys: Sequence[_Key]) -> None:
        """Hold these blocks; where one is missing, some that come after them as well."""
        self._early.difference_update(keys)
        missing = [key for key in keys if key not in self._held]
        if not missing:
            return
        self._handover.wait()
        self._held.update(self._fetch(cut.order, missing))
        early = self._fetcher.most_early(self._held[keys[-1]][0]) // BLOCK
        self._fetch_early(cut.order, *keys[-1], early)
        for key in keys:
            self._held.move_to_end(key)
        self._handover.written()
        seeds = len({seed for seed, _ in self._held})
        while len(self._held) > _blocks(cut.held) + 2 * cut.walks + seeds * early:
            key, _ = self._held.popitem(last=False)
            self._early.discard(key)

    def _fetch_early(self, order: Tensor, seed: int, last: int, blocks: int) -> None:
        """Hold so many blocks that come after the last one of a batch."""
        after = range(last + 1, min(last + 1 + blocks, _blocks(len(order))))
        keys = [(seed, number) for number in after if (seed, number) not in self._held]
        if not keys:
            return
        try:
            self._held.update(self._fetch(order, keys))
        except (Exception, SystemExit):  # not hidden: it is raised when these samples are needed
            return
        self._early.update(keys)

    def _fetch(self, order: Tensor, keys: Iterable[_Key]) -> dict[_Key, list[Any]]:
        """Blocks of samples for keeping."""
        indices = {key: order[key[1] * BLOCK :][:BLOCK].tolist() for key in keys}
        blocks = self._fetch_undrawn(indices) if self._seeds is None else self._fetch_drawn(indices)
        return {key: list(map(compact, block)) if any(map(bulky, block)) else block for key, block in blocks.items()}

    def _fetch_undrawn(self, indices: Mapping[_Key, list[int]]) -> dict[_Key, list[Any]]:
        samples = iter(self._fetcher.fetch_undrawn(chain(*indices.values())))
        return {key: list(islice(samples, len(some))) for key, some in indices.items()}

    def _fetch_drawn(self, indices: Mapping[_Key, list[int]]) -> dict[_Key, list[Any]]:
        if self._seeds == "torch":
            others = OtherGenerators()
            blocks = self._fetch_seeded(indices, torchs_alone=True)
            if not others.moved():
                return blocks
            self._seeds = "all"
        return self._fetch_seeded(indices, torchs_alone=False)

    def _fetch_seeded(self, indices: Mapping[_Key, list[int]], torchs_alone: bool) -> dict[_Key, list[Any]]:
        blocks = {}
        for (seed, number), some in indices.items():
            reseed(derive_seed(seed, "block", number), self._device, torchs_alone)
            blocks[seed, number] = self._fetcher.fetch(some)
        return blocks

    def _drop(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            self._held.pop(key, None)

    def rest(self) -> None:
        """Nobody is abreast of anybody."""
        self._held.clear()
        self._early.clear()
        self._newest.forget()


def _blocks(samples: int) -> int:
    """How many blocks so many samples are."""
    return -(-samples // BLOCK)


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if all(leaf.device == device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)):
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
