"""A data set as batches on a device, of any sizes at once, for all who walk over it in this process."""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from shoal.core.demand import ABREAST, Sharing
from shoal.core.errors import TaskError
from shoal.core.trial import derive_seed
from shoal.data.fetch import Fetcher
from shoal.data.materialized_source import MaterializedSource, materialized_bytes
from shoal.data.sample_window import SampleWindow
from shoal.data.samples import kind, same
from shoal.data.source import BatchRequest, BatchSource, DrawsError, UnevenError
from shoal.fuse.generators import OtherGenerators, forked

__all__ = ["Batches", "epoch_order", "noise_seed"]

_log = logging.getLogger("shoal.pack")

RESIDENT_BYTES = 1 << 30
"""A data set up to this size is kept on the device as a whole."""

CUT_AT_ONCE = 256
"""Batches for which an order of samples is cut by one call."""

LOOKED_AT = 8
"""The first so many samples tell what a data set is."""


def epoch_order(samples: int, data_seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the training set, int64 [samples].

    Args:
        samples: size of the training set.
        data_seed: of the trial.
        epoch: epochs finished before this one.
    """
    generator = torch.Generator().manual_seed(derive_seed(data_seed, "epoch", epoch))
    return torch.randperm(samples, generator=generator)


def noise_seed(data_seed: int, epoch: int | None) -> int:
    """The seed of what samples draw: the generators are seeded with the sum of it and the batch's number, or by blocks
    of samples where augmentation is shared.

    Args:
        data_seed: of the trial.
        epoch: epochs finished before this one; None for the validation set, whose numbers are those of all epochs.
    """
    return derive_seed(data_seed, "valid") if epoch is None else derive_seed(data_seed, "noise", epoch)


class Batches:
    """A data set, cut into batches on a device; what a batch is does not depend on who else walks over the data set.

    Tensor data sets move to the device at once where they are small, and a batch is one indexing. Of any other data set
    samples are fetched one by one and collated, and as much as possible of that is done once for all walks: samples
    are kept if they draw nothing and fit in `RESIDENT_BYTES` together, else held for walks that keep abreast; where
    they draw, whole batches are, for walks of the same batch size. What a data set is, its first samples show.

    Args:
        dataset: with a length and indices.
        device: where batches go.
        name: for messages.
        shared_augmentation: what is drawn for a sample belongs to its place in the order, not to the batch.

    Raises:
        TaskError: it has no length or no indices, or is empty.
    """

    def __init__(
        self, dataset: Dataset[Any], device: torch.device, name: str, shared_augmentation: bool = False
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TaskError(f"the {name} set must have a length and indices, got {type(dataset).__name__}")
        self.samples = len(dataset)
        if self.samples == 0:
            raise TaskError(f"the {name} set is empty; see what `data` of the task reads, and where from")
        self._device = device
        self._name = name
        self._shared_augmentation = shared_augmentation
        self._fetcher = Fetcher(dataset, device)
        self._source: BatchSource | None = None
        self._walks: list[int] = []  # the batch sizes of those under way
        self._largest = 0
        self._resident: list[Tensor] | None = None
        tensors = _tensors(dataset)
        if tensors is not None and sum(tensor.nbytes for tensor in tensors) <= RESIDENT_BYTES:
            self._resident = [tensor.to(device) for tensor in tensors]

    @property
    def fetched(self) -> int:
        """Samples asked of the data set so far, but for those that were asked for to find out what they are."""
        return self._fetcher.fetched

    @property
    def early(self) -> int:
        """Of these, samples that are in no batch that was asked for yet."""
        return 0 if self._source is None else self._source.early

    @property
    def fetch_seconds(self) -> float:
        """Wall time that they took."""
        return self._fetcher.seconds

    @property
    def sharing(self) -> Sharing:
        """What walks can share; a few samples are fetched for that if there was no batch yet."""
        if self._resident is not None:
            return "resident"
        return self._known().sharing

    @property
    def abreast(self) -> bool:
        """Whether walks share only what is fetched while they are at the same place."""
        return self.sharing in ABREAST

    @property
    def unfilled(self) -> int:
        """Bytes of main memory that the samples still to be kept will take."""
        source = None if self._resident is not None else self._known()
        return source.unfilled if isinstance(source, MaterializedSource) else 0

    def steps(self, batch_size: int) -> int:
        """Batches of one pass."""
        return math.ceil(self.samples / batch_size)

    def walk(
        self,
        batch_size: int,
        order: Tensor | None = None,
        first: int = 0,
        seed: int | None = None,
    ) -> Iterator[Any]:
        """One pass.

        Args:
            batch_size: of all batches but perhaps the last.
            order: indices of the samples, int64 [samples]; as they are by default.
            first: number of the first batch to give; those before are skipped unread.
            seed: what data sets draw for a batch depends on it and the batch's number, or the samples' places where
                augmentation is shared; walks of one seed are to have one order.
        """
        if self._resident is not None:
            yield from self._walk_resident(self._resident, batch_size, order, first)
            return
        order = torch.arange(self.samples, device="cpu") if order is None else order.cpu()
        there = order.to(self._device)
        self._walks.append(batch_size)
        self._largest = max(self._largest, batch_size)
        try:
            for number in range(first, self.steps(batch_size)):
                part = slice(number * batch_size, (number + 1) * batch_size)
                held = 2 * max(self._largest, sum(self._walks))
                walks, alike = len(self._walks), self._walks.count(batch_size)
                yield self._batch(
                    BatchRequest(order[part], there[part], number, order, part.start, seed, walks, alike, held)
                )
        finally:
            self._walks.remove(batch_size)
            if not self._walks and self._source is not None:
                self._source.rest()

    def _walk_resident(
        self,
        tensors: list[Tensor],
        batch_size: int,
        order: Tensor | None,
        first: int,
    ) -> Iterator[Any]:
        if order is not None:
            order = order.to(self._device)
        # A batch is its user's own: what is done to it in place must not reach the data.
        if order is None:
            for number in range(first, self.steps(batch_size)):
                part = slice(number * batch_size, (number + 1) * batch_size)
                yield [tensor[part].clone() for tensor in tensors]
        else:
            for start in range(first * batch_size, self.samples, CUT_AT_ONCE * batch_size):
                for rows in torch.split(order[start : start + CUT_AT_ONCE * batch_size], batch_size):
                    yield [tensor.index_select(0, rows) for tensor in tensors]

    def _batch(self, cut: BatchRequest) -> Any:
        while True:
            try:
                return self._known().batch(cut)
            except UnevenError:
                self._source = SampleWindow(self._fetcher, self._device)
            except DrawsError:
                self._source = self._drawing()

    def _known(self) -> BatchSource:
        if self._source is None:
            self._source = self._found_out(range(min(self.samples, LOOKED_AT)))
        return self._source

    def _found_out(self, indices: Sequence[int]) -> BatchSource:
        """What makes batches of samples such as these; no generator is seen to have moved."""
        others = OtherGenerators()
        with forked([torch.device(self._device).index or 0] if self._device.type == "cuda" else []):
            try:
                return self._fitting(indices)
            except DrawsError:
                return self._drawing()
            finally:
                others.restore()

    def _fitting(self, indices: Sequence[int]) -> BatchSource:
        one_by_one, samples = self._fetcher.look(indices)
        if not all(map(same, one_by_one, samples)):
            _log.warning(
                "the %s set gives other samples when asked once more, but draws nothing from the generators that are "
                "seeded: trials alone and in company may differ; draw from torch's default generator instead",
                self._name,
            )
            return self._drawing()
        size = None
        if all(kind(sample) == kind(samples[0]) for sample in samples):
            size = materialized_bytes(default_collate(samples), len(samples), self.samples)
        if size is None or size > RESIDENT_BYTES:
            return SampleWindow(self._fetcher, self._device)
        return MaterializedSource(self._fetcher, self.samples, samples[:1], self._device)

    def _drawing(self) -> BatchSource:
        return SampleWindow(self._fetcher, self._device, draws=True, whole=not self._shared_augmentation)


def _tensors(dataset: Dataset[Any]) -> list[Tensor] | None:
    """The data of a `TensorDataset`, or of a part of one as `random_split` makes it; None of anything else."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is Subset and (whole := _tensors(dataset.dataset)) is not None:
        return [tensor[torch.as_tensor(dataset.indices)] for tensor in whole]
    return None
