"""Samples that are held for as long as lanes that keep abreast need them: decoded once in an epoch."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.cost.demand import Sharing
from shoal.fuse.beside import accompanied
from shoal.fuse.generators import OtherGenerators, reseed, reseed_torch
from shoal.pack.fetch import Fetcher
from shoal.pack.samples import attached, compact, fresh, plain
from shoal.pack.source import Cut, Source
from shoal.pack.streams import Handover
from shoal.trial import derive_seed

__all__ = ["Window", "moved"]


class Window(Source):
    """The last few samples of a data set, as they were fetched, for who needs them next.

    Of lanes of which always the one furthest behind goes on, no two are ever further apart than the largest batch, so
    twice that is enough.

    Args:
        fetcher: of the data set.
        device: where batches go.
        seeds: generators that samples have drawn from so far. They are seeded for each, by the walk's seed and the
            sample's index; None where samples draw nothing. Where they draw from Python's or NumPy's as well, later on,
            what was just fetched is fetched again, and these are seeded from then on.
    """

    sharing: ClassVar[Sharing] = "window"

    def __init__(self, fetcher: Fetcher, device: torch.device, seeds: Literal["torch", "all"] | None = None) -> None:
        self._fetcher = fetcher
        self._device = device
        self._seeds = seeds
        self._held: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._newest: tuple[int, tuple[int, ...], Any] | None = None  # seed, indices, and the batch of them
        self._handover = Handover(device)

    def batch(self, cut: Cut) -> Any:
        """The batch, after those samples were fetched that are not held.

        Raises:
            DrawsError: that drew, and should not have.
        """
        indices = tuple(cut.at.tolist())
        seed = 0
        if self._seeds is not None:
            if cut.seed is None:
                return moved(default_collate(self._fetcher.fetch(indices)), self._device)
            seed = cut.seed
        if self._newest is not None and self._newest[:2] == (seed, indices):
            self._handover.read(self._newest[2])
            return fresh(self._newest[2])
        keys = [(seed, index) for index in indices]
        found = {key: self._held[key] for key in keys if key in self._held}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            self._handover.wait()
            fetched = dict(zip(missing, self._fetch(missing), strict=True))
            found |= fetched
        self._handover.read(list(found.values()))
        batch = moved(default_collate([found[key] for key in keys]), self._device)
        if missing:
            self._hold(fetched, cut.held)
        if cut.alike > 1 and plain(batch):
            self._newest = seed, indices, fresh(batch)
            self._handover.written()
        return batch

    def _fetch(self, keys: list[tuple[int, int]]) -> list[Any]:
        if self._seeds is None:
            return self._fetcher.fetch_undrawn(index for _, index in keys)
        if self._seeds == "torch" and not accompanied():
            others = OtherGenerators()
            samples = self._fetch_seeded(keys, torchs_alone=True)
            if not others.moved():
                return samples
            self._seeds = "all"
        return self._fetch_seeded(keys, torchs_alone=False)

    def _fetch_seeded(self, keys: list[tuple[int, int]], torchs_alone: bool) -> list[Any]:
        indices = [index for _, index in keys]
        return self._fetcher.fetch(self._seeded(indices, sample_seeds(keys[0][0], indices), torchs_alone))

    def _seeded(self, indices: Iterable[int], seeds: Sequence[int], torchs_alone: bool) -> Iterator[int]:
        """The indices; before each is given, generators are seeded for the sample."""
        reseed(seeds[0], self._device, torchs_alone)
        again = reseed_torch if torchs_alone else reseed
        for index, seed in zip(indices, seeds, strict=True):
            again(seed, self._device)
            yield index

    def put(self, indices: Sequence[int], samples: Sequence[Any]) -> None:
        """Hold samples of a data set that draws nothing."""
        self._hold({(0, index): sample for index, sample in zip(indices, samples, strict=True)}, len(samples))

    def _hold(self, fetched: Mapping[tuple[int, int], Any], held: int) -> None:
        self._held.update((key, compact(sample)) for key, sample in fetched.items() if not attached(sample))
        self._handover.written()
        while len(self._held) > held:
            self._held.popitem(last=False)

    def rest(self) -> None:
        """Nobody is abreast of anybody."""
        self._held.clear()
        self._newest = None


def sample_seeds(seed: int, indices: Sequence[int]) -> list[int]:
    """Of samples, in [0, 2**63); each depends on the walk's seed and its index alone (SplitMix64, Steele et al.)."""
    z = np.asarray(indices, np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(derive_seed(seed, "sample"))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: list[int] = ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).tolist()
    return seeds


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
