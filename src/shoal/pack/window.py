"""Samples that are held for as long as lanes that keep abreast need them: decoded once in an epoch."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shoal.cost.demand import Sharing
from shoal.fuse.beside import accompanied
from shoal.fuse.generators import OtherGenerators, reseed
from shoal.pack.fetch import Fetcher
from shoal.pack.samples import attached, compact
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
        self._handover = Handover(device)

    def batch(self, cut: Cut) -> Any:
        """The batch, after those samples were fetched that are not held.

        Raises:
            DrawsError: that drew, and should not have.
        """
        indices = cut.at.tolist()
        seed = 0
        if self._seeds is not None:
            if cut.seed is None:
                return moved(default_collate(self._fetcher.fetch(indices)), self._device)
            seed = cut.seed
        keys = [(seed, index) for index in indices]
        found = {key: self._held[key] for key in keys if key in self._held}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            self._handover.wait()
            fetched = dict(zip(missing, self._fetch(missing), strict=True))
            found |= fetched
        self._handover.read(list(found.values()))
        batch = default_collate([found[key] for key in keys])
        if missing:
            self._hold(fetched, cut.held)
        return moved(batch, self._device)

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
        samples = []
        for seed, index in keys:
            reseed(derive_seed(seed, "sample", index), self._device, torchs_alone)
            samples += self._fetcher.fetch((index,))
        return samples

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


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
