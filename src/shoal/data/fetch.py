"""Fetches samples from a data set; counts and times them, and detects random draws."""

import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from shoal.data.iterable import IterableReader
from shoal.data.processes import FetchRequest, LoaderProcesses
from shoal.data.samples import attached, copied, same
from shoal.data.source import DrawsError
from shoal.fuse.generators import DrawDetector, PythonRngSnapshot

__all__ = ["Fetcher"]

EARLY_SECONDS, EARLY_BYTES = 0.05, 16 << 20
"""Most seconds and bytes of samples that are fetched in advance. Steps without fetching in between find warm caches.
But training waits meanwhile, and may end without the samples."""


class Fetcher:
    """Fetches the samples of a data set.

    Args:
        dataset: Data set with a length and indices, or the reader of an iterable one.
        device: Device whose generator is watched, beside those of the CPU.
        processes: Loader processes that fetch all samples; None to fetch them in this process.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | IterableReader,
        device: torch.device,
        processes: LoaderProcesses | None = None,
    ) -> None:
        self._processes = processes
        self._lone = count()
        self._dataset = dataset
        self._device = device
        self.fetched = 0
        """Number of samples fetched, without those of `look`."""
        self.seconds = 0.0
        """Wall time of fetching them; with loader processes, of waiting for them."""

    @property
    def ahead(self) -> int:
        """Number of units that loader processes fetch in advance; 0 if there are none."""
        return 0 if self._processes is None else self._processes.ahead

    def receive(self, wanted: FetchRequest, upcoming: Iterable[FetchRequest] = ()) -> tuple[Sequence[int], Any]:
        """Fetch samples in the loader processes: see `LoaderProcesses.get`."""
        assert self._processes is not None
        began = time.perf_counter()
        indices, value = self._processes.get(wanted, upcoming)
        self.seconds += time.perf_counter() - began
        self.fetched += len(indices)
        return indices, value

    def forget(self) -> None:
        """Drop what loader processes have fetched in advance."""
        if self._processes is not None:
            self._processes.forget()

    def _receive_lone(self, indices: Iterable[int], draws: bool = False, twice: bool = False) -> Any:
        """Fetch samples of no unit in the loader processes."""
        wanted = FetchRequest(("lone", next(self._lone)), tuple(indices), draws=draws, twice=twice)
        return self.receive(wanted)[1]

    def fetch(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples, in order."""
        if self._processes is not None:
            received: list[Any] = self._receive_lone(indices, draws=True)
            return received
        began = time.perf_counter()
        if isinstance(self._dataset, IterableReader):
            samples = self._dataset.read(list(indices))
        else:
            samples = [self._dataset[i] for i in indices]
        self.seconds += time.perf_counter() - began
        self.fetched += len(samples)
        return samples

    def fetch_undrawn(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples of a data set that draws no random numbers.

        Raises:
            DrawsError: It drew some; the generators are restored.
        """
        if self._processes is not None:
            received: list[Any] = self._receive_lone(indices)
            return received
        if isinstance(self._dataset, IterableReader):  # it restores the generators
            return self.fetch(indices)
        torchs, others = DrawDetector(self._device), PythonRngSnapshot()
        samples = self.fetch(indices)
        if torchs() or others.has_drawn():
            torchs.restore()
            others.restore()
            raise DrawsError
        return samples

    def most_early(self, sample: Any) -> int:
        """How many samples like this one to fetch in advance.

        0 for a GPU, which steps while samples are fetched, and for loader processes, which have their own measure. 0 if
        samples have an autograd graph, which can be used only once.
        """
        if self.ahead or self._device.type != "cpu" or attached(sample):
            return 0
        size = sum(getattr(leaf, "nbytes", 0) for leaf in pytree.tree_leaves(sample))
        each = self.seconds / self.fetched
        return int(min(EARLY_SECONDS / max(each, 1e-6), EARLY_BYTES / max(size, 1024)))

    def look(self, indices: Sequence[int]) -> tuple[list[Any], bool]:
        """Fetch samples twice to find out their kind; as `fetch_undrawn`, but not counted.

        Returns:
            Samples, fetched in a row. Whether they equal those fetched one by one before, each copied at once.
        """
        before = self.fetched, self.seconds
        try:
            if self._processes is not None:
                found: tuple[list[Any], bool] = self._receive_lone(indices, twice=True)
                return found
            one_by_one = [copied(*self.fetch_undrawn((index,))) for index in indices]
            samples = self.fetch_undrawn(indices)
            return samples, all(map(same, one_by_one, samples))
        finally:
            self.fetched, self.seconds = before
