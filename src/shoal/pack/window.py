"""Samples that are held for as long as lanes that keep abreast need them: decoded once in an epoch."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.cost.demand import Sharing
from shoal.fuse.beside import accompanied
from shoal.fuse.generators import OtherGenerators, reseed
from shoal.fuse.lazy import lazily_copied
from shoal.pack.fetch import Fetcher
from shoal.pack.samples import attached, compact, plain
from shoal.pack.source import Cut, Source
from shoal.pack.streams import Handover
from shoal.trial import derive_seed

__all__ = ["Window", "moved"]

BLOCK = 32
"""Samples that follow each other in a walk and are fetched together where they draw: to seed the generators for each by
itself takes long beside decoding a small picture."""

Key = tuple[int, int, int]
"""A walk's seed, the sample's place in it, and its index; both 0 for samples that draw nothing."""

_Place = tuple[int | None, int, list[int]]
"""A walk's seed, the place of a batch's first sample in it, and the indices of its samples."""


class Window(Source):
    """The last few samples of a data set, as they were fetched, for who needs them next.

    Of lanes of which always the one furthest behind goes on, no two are ever further apart than the largest batch, so
    twice that is enough.

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
        self._held: OrderedDict[Key, Any] = OrderedDict()
        self._newest: tuple[_Place, Any, int] | None = None  # a batch, where it comes, and how often it is wanted
        self._seed: int | None = None  # of the walk that asked last
        self._handover = Handover(device)

    def batch(self, cut: Cut) -> Any:
        """The batch, after those samples were fetched that are not held.

        Raises:
            DrawsError: that drew, and should not have.
        """
        indices = cut.at.tolist()
        if self._newest is not None and self._newest[0] == (cut.seed, cut.first, indices):
            return self._again(*self._newest)
        if self._seeds is None:
            keys, most = [(0, 0, index) for index in indices], cut.held
        elif cut.seed is None:
            return moved(default_collate(self._fetcher.fetch(indices)), self._device)
        else:
            keys = [(cut.seed, place, index) for place, index in enumerate(indices, cut.first)]
            most = cut.held + 2 * BLOCK
        found = {key: self._held[key] for key in keys if key in self._held}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            self._handover.wait()
            fetched = self._fetch(cut, missing)
            found |= fetched
        self._handover.read(list(found.values()))
        batch = moved(default_collate([found[key] for key in keys]), self._device)
        handed_on = cut.alike > 1 and plain(batch)
        if missing:
            to_one = self._shares_batches(cut) and (cut.alike == 1 or handed_on)
            left = fetched.keys() - set(keys) if to_one else fetched.keys()
            keep = [key for key in fetched if key in left and not attached(fetched[key])]
            self._hold({key: fetched[key] if to_one else compact(fetched[key]) for key in keep}, most)
        self._seed = cut.seed
        if handed_on:
            self._newest = (cut.seed, cut.first, indices), lazily_copied(batch), cut.alike - 1
            self._handover.written()
        return batch

    def _shares_batches(self, cut: Cut) -> bool:
        """Whether nobody needs a batch's samples but who takes the batch: all walks are of its size, and the last of
        them took the one before it. In the first batch of an epoch others may have yet to begin. What was fetched
        beside it is for the next batch then, and so soon gone that it need not be compact.
        """
        return cut.seed is not None and cut.seed == self._seed and cut.alike == cut.walks and self._newest is None

    def _again(self, place: _Place, batch: Any, wanted: int) -> Any:
        """The newest batch; who is the last to want it need not have a copy."""
        self._handover.read(batch)
        self._newest = (place, batch, wanted - 1) if wanted > 1 else None
        return lazily_copied(batch) if wanted > 1 else batch

    def _fetch(self, cut: Cut, missing: Sequence[Key]) -> dict[Key, Any]:
        """Samples, and those that are in their blocks."""
        if self._seeds is None:
            samples = self._fetcher.fetch_undrawn(index for *_, index in missing)
            return dict(zip(missing, samples, strict=True))
        blocks = dict.fromkeys(place // BLOCK for _, place, _ in missing)
        if self._seeds == "torch" and not accompanied():
            others = OtherGenerators()
            fetched = self._fetch_seeded(cut, blocks, torchs_alone=True)
            if not others.moved():
                return fetched
            self._seeds = "all"
        return self._fetch_seeded(cut, blocks, torchs_alone=False)

    def _fetch_seeded(self, cut: Cut, blocks: Iterable[int], torchs_alone: bool) -> dict[Key, Any]:
        assert cut.seed is not None  # samples draw, and without a seed none is held
        fetched: dict[Key, Any] = {}
        for block in blocks:
            first = block * BLOCK
            indices = cut.order[first : first + BLOCK].tolist()
            reseed(derive_seed(cut.seed, "block", block), self._device, torchs_alone)
            for place, (index, sample) in enumerate(zip(indices, self._fetcher.fetch(indices), strict=True), first):
                fetched[cut.seed, place, index] = sample
        return fetched

    def put(self, indices: Sequence[int], samples: Sequence[Any]) -> None:
        """Hold samples of a data set that draws nothing."""
        found = zip(indices, samples, strict=True)
        self._hold({(0, 0, index): compact(one) for index, one in found if not attached(one)}, len(samples))

    def _hold(self, samples: Mapping[Key, Any], most: int) -> None:
        self._held.update(samples)
        self._handover.written()
        while len(self._held) > most:
            self._held.popitem(last=False)

    def rest(self) -> None:
        """Nobody is abreast of anybody."""
        self._held.clear()
        self._newest = self._seed = None


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if all(leaf.device == device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)):
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
