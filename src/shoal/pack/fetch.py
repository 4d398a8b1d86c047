"""Asks a data set for its samples: counted, timed, and watched for whether that draws."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

from shoal.fuse.generators import Drawn, OtherGenerators
from shoal.pack.samples import copied
from shoal.pack.source import DrawsError

__all__ = ["Fetcher"]


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
        torchs_alone = not others.moved()
        if torchs() or not torchs_alone:
            torchs.put_back()
            others.restore()
            raise DrawsError(torchs_alone)
        return samples

    def look(self, indices: Iterable[int]) -> list[Any]:
        """Samples that nobody gets, to find out what they are; as `fetch_undrawn`, uncounted."""
        before = self.fetched, self.seconds
        try:  # each is copied at once, for the next may be made in the same memory
            return [copied(sample) for index in indices for sample in self.fetch_undrawn((index,))]
        finally:
            self.fetched, self.seconds = before
