"""Asks a data set for its samples: counted, timed, and watched for whether that draws."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from shoal.data.samples import attached, copied
from shoal.data.source import DrawsError
from shoal.fuse.generators import Drawn, OtherGenerators

__all__ = ["Fetcher"]

EARLY_SECONDS, EARLY_BYTES = 0.05, 16 << 20
"""For how long samples are fetched that nobody has asked for yet, and the memory that they may take. Steps between
which none are fetched find their caches warm; but who steps waits meanwhile, and may leave without the samples."""


class Fetcher:
    """Fetches the samples of a data set.

    Args:
        dataset: with a length and indices.
        device: whose generator is watched beside those of the CPU.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device) -> None:
        self._dataset = dataset
        self._device = device
        self.fetched = 0
        """Samples asked of the data set, but for those that were only looked at."""
        self.seconds = 0.0
        """Wall time of that."""

    def fetch(self, indices: Iterable[int]) -> list[Any]:
        """Samples, in order."""
        began = time.perf_counter()
        samples = [self._dataset[i] for i in indices]
        self.seconds += time.perf_counter() - began
        self.fetched += len(samples)
        return samples

    def fetch_undrawn(self, indices: Iterable[int]) -> list[Any]:
        """Samples of a data set that draws nothing.

        Raises:
            DrawsError: it did.
        """
        torchs, others = Drawn(self._device), OtherGenerators()
        samples = self.fetch(indices)
        if torchs() or others.moved():
            torchs.restore()
            others.restore()
            raise DrawsError
        return samples

    def most_early(self, sample: Any) -> int:
        """How many samples like this one to fetch beyond those that were asked for.

        None for a GPU: it takes its steps while samples are fetched. None either where a graph hangs on them, which
        goes backward but once.
        """
        if self._device.type != "cpu" or attached(sample):
            return 0
        size = sum(getattr(leaf, "nbytes", 0) for leaf in pytree.tree_leaves(sample))
        each = self.seconds / self.fetched
        return int(min(EARLY_SECONDS / max(each, 1e-6), EARLY_BYTES / max(size, 1024)))

    def look(self, indices: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Samples that nobody gets, asked for twice, to find out what they are; as `fetch_undrawn`, uncounted.

        Returns:
            Those that were asked for one by one, each copied at once; and those asked for in a row, the next of which
            may have been made in the same memory.
        """
        before = self.fetched, self.seconds
        try:
            return [copied(*self.fetch_undrawn((index,))) for index in indices], self.fetch_undrawn(indices)
        finally:
            self.fetched, self.seconds = before
