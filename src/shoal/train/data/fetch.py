"""Fetches samples from a data set, counts and times them, and detects draws of random numbers."""

import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from shoal.fuse.generators import DrawDetector, PythonRngSnapshot
from shoal.fuse.rows import bytes_of
from shoal.train.data.iterable import IterableReader
from shoal.train.data.loader_processes import FetchRequest, LoaderProcesses
from shoal.train.data.samples import copy_sample, has_graph, samples_equal
from shoal.train.data.source import RandomSampleError

__all__ = ["Fetcher"]

MAX_PREFETCH_SECONDS, MAX_PREFETCH_BYTES = 0.05, 16 << 20
"""Maximum seconds and bytes of samples that are fetched in advance. Steps that follow one another without fetching in
between find warm caches. But training waits while samples are fetched, and may end without using them."""


class Fetcher:
    """Fetches the samples of a data set.

    Args:
        dataset: Data set with a length and indices, or the reader of an iterable one.
        device: Device whose generator is checked for draws, in addition to the generators of the CPU.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | IterableReader,
        device: torch.device,
        processes: LoaderProcesses | None = None,
    ) -> None:
        self._processes = processes
        self._request_numbers = count()
        self._dataset = dataset
        self._device = device
        self.fetched = 0
        """Number of samples fetched, except by `probe`."""
        self.seconds = 0.0
        """Wall time of fetching these samples, in seconds; with loader processes, of waiting for them."""
        self.cpu_seconds = 0.0
        """CPU time of fetching them; with loader processes, which compute meanwhile, the wall time."""

    @property
    def prefetch_limit(self) -> int:
        """Number of units that loader processes fetch in advance; 0 if there are none."""
        return 0 if self._processes is None else self._processes.prefetch_limit

    def fetch_in_workers(
        self, wanted: FetchRequest, upcoming: Iterable[FetchRequest] = ()
    ) -> tuple[Sequence[int], Any]:
        """Fetch samples in the loader processes; see `LoaderProcesses.get`."""
        assert self._processes is not None
        began = time.perf_counter()
        indices, value = self._processes.get(wanted, upcoming)
        waited = time.perf_counter() - began
        self.seconds += waited
        self.cpu_seconds += waited
        self.fetched += len(indices)
        return indices, value

    def drop_prefetched(self) -> None:
        """Drop the samples that loader processes have fetched in advance."""
        if self._processes is not None:
            self._processes.drop_prefetched()

    def _fetch_once_in_workers(
        self, indices: Iterable[int], random_samples: bool = False, check_repeatable: bool = False
    ) -> Any:
        """Fetch samples that belong to no unit in the loader processes."""
        wanted = FetchRequest(
            ("single", next(self._request_numbers)),
            tuple(indices),
            random_samples=random_samples,
            check_repeatable=check_repeatable,
        )
        return self.fetch_in_workers(wanted)[1]

    def fetch(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples, in order."""
        if self._processes is not None:
            received: list[Any] = self._fetch_once_in_workers(indices, random_samples=True)
            return received
        began, cpu = time.perf_counter(), time.process_time()
        if isinstance(self._dataset, IterableReader):
            samples = self._dataset.read(list(indices))
        else:
            samples = [self._dataset[i] for i in indices]
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu
        self.fetched += len(samples)
        return samples

    def fetch_deterministic(self, indices: Iterable[int]) -> list[Any]:
        """Fetch samples of a data set that draws no random numbers; else raise RandomSampleError."""
        if self._processes is not None:
            received: list[Any] = self._fetch_once_in_workers(indices)
            return received
        if isinstance(self._dataset, IterableReader):  # the reader restores the generators
            return self.fetch(indices)
        torchs, others = DrawDetector(self._device), PythonRngSnapshot()
        samples = self.fetch(indices)
        if torchs() or others.has_drawn():
            torchs.restore()
            others.restore()
            raise RandomSampleError
        return samples

    def prefetch_count(self, sample: Any) -> int:
        """Return the number of samples like this one to fetch in advance.

        It is 0 for a GPU, which computes meanwhile, for loader processes, which prefetch, and for samples with a graph.
        """
        if self.prefetch_limit or self._device.type != "cpu" or has_graph(sample):
            return 0
        leaves = pytree.tree_leaves(sample)
        size = bytes_of(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        size += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, (np.ndarray, np.generic)))
        each = self.seconds / self.fetched
        return int(min(MAX_PREFETCH_SECONDS / max(each, 1e-6), MAX_PREFETCH_BYTES / max(size, 1024)))

    def probe(self, indices: Sequence[int]) -> tuple[list[Any], bool]:
        """As `fetch_deterministic`, uncounted; also return whether samples in a row equal those fetched singly."""
        before = self.fetched, self.seconds, self.cpu_seconds
        try:
            if self._processes is not None:
                found: tuple[list[Any], bool] = self._fetch_once_in_workers(indices, check_repeatable=True)
                return found
            one_by_one = [copy_sample(*self.fetch_deterministic((index,))) for index in indices]
            samples = self.fetch_deterministic(indices)
            return samples, all(map(samples_equal, one_by_one, samples))
        finally:
            self.fetched, self.seconds, self.cpu_seconds = before
