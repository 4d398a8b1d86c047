"""Fetches samples from a data set; counts and times them, and detects random draws."""

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
"""Most seconds and bytes of samples that are fetched in advance. Steps without fetching in between find warm caches.
But training waits meanwhile, and may end without the samples."""


class Fetcher:
    """Fetches the samples of a data set.

    Args:
        dataset: Data set with a length and indices.
        device: Device whose generator is watched, beside those of the CPU.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device) -> None:
        self._dataset = dataset
        self._device = device
        self.fetched = 0
        """Number of samples fetched, without those of `look`."""
        self.seconds = 0.0
        """Wall time of fetching them."""

    def fetch(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples, in order."""
        began = time.perf_counter()
        samples = [self._dataset[i] for i in indices]
        self.seconds += time.perf_counter() - began
        self.fetched += len(samples)
        return samples

    def fetch_undrawn(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples of a data set that draws no random numbers.

        Raises:
            DrawsError: It drew some; the generators are restored.
        """
        torchs, others = Drawn(self._device), OtherGenerators()
        samples = self.fetch(indices)
        if torchs() or others.moved():
            torchs.restore()
            others.restore()
            raise DrawsError
        return samples

    def most_early(self, sample: Any) -> int:
        """How many samples like this one to fetch in advance.

        0 for a GPU, which steps while samples are fetched. 0 if samples have an autograd graph, which can be used only
        once.
        """
        if self._device.type != "cpu" or attached(sample):
            return 0
        size = sum(getattr(leaf, "nbytes", 0) for leaf in pytree.tree_leaves(sample))
        each = self.seconds / self.fetched
        return int(min(EARLY_SECONDS / max(each, 1e-6), EARLY_BYTES / max(size, 1024)))

    def look(self, indices: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Fetch samples twice to find out their kind; as `fetch_undrawn`, but not counted.

        Returns:
            Samples fetched one by one, each copied at once. Samples fetched in a row, which may share memory.
        """
        before = self.fetched, self.seconds
        try:
            return [copied(*self.fetch_undrawn((index,))) for index in indices], self.fetch_undrawn(indices)
        finally:
            self.fetched, self.seconds = before
