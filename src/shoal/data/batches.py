"""A data set as batches on a device, of several sizes at once, shared by all trials of a process."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from shoal.core.demand import ABREAST, Sharing
from shoal.core.errors import TaskError
from shoal.data.fetch import Fetcher
from shoal.data.iterable import IterableReader, PassOrder
from shoal.data.loader import LoaderSettings, is_iterable
from shoal.data.materialized_source import MaterializedSource, materialized_bytes
from shoal.data.processes import LoaderProcesses
from shoal.data.sample_window import SampleWindow
from shoal.data.samples import kind
from shoal.data.source import BatchRequest, BatchSource, DrawsError, UnevenError
from shoal.fuse.generators import PythonRngSnapshot, forked_rng

__all__ = ["Batches"]

_log = logging.getLogger("shoal.pack")

RESIDENT_BYTES = 1 << 30
"""Most bytes of a data set that is kept on the device as a whole."""

CUT_AT_ONCE = 256
"""Number of batches whose indices are split in one call."""

LOOKED_AT = 8
"""Number of first samples that show what kind of data set it is."""


_PLAIN = LoaderSettings()


class Batches:
    """A data set, cut into batches on a device. A batch does not depend on other walks over the data set.

    Small tensor data sets move to the device as a whole, and a batch is one indexing. Samples of other data sets are
    fetched one by one and collated, once for all walks where possible:

    - Samples that draw no random numbers and fit in `RESIDENT_BYTES` are kept.
    - Larger ones are held for walks that keep abreast.
    - Where samples draw, whole batches are held, for walks of the same batch size.

    The first samples decide which case applies. Those of an iterable data set are held for walks that keep abreast.

    Args:
        dataset: Data set with a length and indices, or an iterable one.
        device: Device of the batches.
        name: Name for messages.
        shared_augmentation: Whether the draws for a sample depend on its place in the order, not on its batch.
        collate: Makes a batch of samples; None for torch's default. One of the user's may draw random numbers, so whole
            batches are held then, for walks of the same batch size.
        settings: How the data set is read.

    Raises:
        TaskError: The data set has no length or no indices and cannot be iterated over anew, or an epoch has no
            samples.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        name: str,
        shared_augmentation: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        settings: LoaderSettings = _PLAIN,
    ) -> None:
        self._reader = IterableReader(dataset, name) if is_iterable(dataset) else None
        if self._reader is not None:
            dataset = self._reader
        elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TaskError(
                f"the {name} set must have a length and indices, or an `__iter__` that begins anew at each call, got "
                f"{type(dataset).__name__}"
            )
        self.samples = settings.samples(dataset)
        """Number of samples of an epoch."""
        self.batch_size = settings.batch_size
        """Samples of a batch as the task's `DataLoader` has them; None if the task's `batch_size` says."""
        self._settings = settings
        self._rows = len(dataset)
        if self.samples == 0 or self._rows == 0:
            raise TaskError(f"the {name} set is empty; check what `data` of the task reads")
        self._device = device
        self._name = name
        self._shared_augmentation = shared_augmentation
        self._collate = collate
        self._source: BatchSource | None = None
        self._walks: list[int] = []  # batch sizes of the walks under way
        self._largest = 0
        self._resident: list[Tensor] | None = None
        tensors = None if collate is not None else _tensors(dataset)
        if tensors is not None and sum(tensor.nbytes for tensor in tensors) <= RESIDENT_BYTES:
            self._resident = [tensor.to(device) for tensor in tensors]
        processes = None
        if settings.workers and self._resident is None:
            processes = LoaderProcesses(dataset, collate or default_collate, name, settings)
        self._fetcher = Fetcher(dataset, device, processes)

    @property
    def endless(self) -> bool:
        """Whether the data set is iterable and has no length. A walk over it has no end: pass follows pass."""
        return self._reader is not None and self._reader.endless

    @property
    def fetched(self) -> int:
        """Number of samples fetched so far, without those that only decided the kind of data set."""
        return self._fetcher.fetched

    @property
    def early(self) -> int:
        """Number of fetched samples that no batch has needed yet."""
        return 0 if self._source is None else self._source.early

    @property
    def fetch_seconds(self) -> float:
        """Wall time of fetching."""
        return self._fetcher.seconds

    @property
    def sharing(self) -> Sharing:
        """Kind of samples that walks can share. If there was no batch yet, a few samples are fetched to find out."""
        if self._resident is not None:
            return "resident"
        return self._known().sharing

    @property
    def abreast(self) -> bool:
        """Whether walks share samples only while they are at the same place."""
        return self.sharing in ABREAST

    @property
    def unfilled(self) -> int:
        """Bytes of host memory that samples yet to be kept will take."""
        source = None if self._resident is not None else self._known()
        return source.unfilled if isinstance(source, MaterializedSource) else 0

    def steps(self, batch_size: int) -> int:
        """Number of batches in one pass.

        Raises:
            TaskError: There are fewer samples than one batch has, and the last batch is dropped.
        """
        if not self._settings.drop_last:
            return math.ceil(self.samples / batch_size)
        if self.samples < batch_size:
            raise TaskError(
                f"the {self._name} loader drops its only batch: an epoch has {self.samples} samples, a batch "
                f"{batch_size}, and `drop_last` is True; make batches smaller, or the loader with drop_last=False"
            )
        return self.samples // batch_size

    def order(self, data_seed: int, epoch: int | None) -> Tensor | PassOrder | None:
        """The order of an epoch: indices, int64 [samples], or None for all samples in ascending order.

        Of an iterable data set, the indices of one pass.

        Args:
            data_seed: Data seed of the trial.
            epoch: Number of epochs before this one; None for the validation set.

        Raises:
            TaskError: The sampler of the task's `DataLoader` yields another number of indices than its length, or
                an index that the data set does not have.
        """
        if self._reader is not None:
            return self._reader.order(data_seed, epoch)
        order = self._settings.indices(self.samples, data_seed, epoch)
        if order is not None and not 0 <= int(order.min()) <= int(order.max()) < self._rows:
            wrong = next(each for each in order.tolist() if not 0 <= each < self._rows)
            raise TaskError(
                f"the sampler of the {self._name} loader yields {wrong}, and the data set has the indices 0 to "
                f"{self._rows - 1}"
            )
        return order

    def walk(
        self,
        batch_size: int,
        order: Tensor | PassOrder | None = None,
        first: int = 0,
        seed: int | None = None,
    ) -> Iterator[Any]:
        """The batches of one pass.

        Args:
            batch_size: Samples of each batch; the last may be smaller.
            order: Indices of the samples, int64 [samples]; ascending by default. Or the pass over an iterable data set.
            first: Number of the first batch to yield; earlier ones are not read.
            seed: Seed for samples that draw, together with the batch's number, or with the samples' places if
                augmentation is shared. Walks with equal seeds must have equal orders.
        """
        there: Tensor | PassOrder
        if isinstance(order, PassOrder):
            there = order
        else:
            if self._resident is not None:
                yield from self._walk_resident(self._resident, batch_size, order, first)
                return
            order = torch.arange(self.samples, device="cpu") if order is None else order.cpu()
            order = order[: self.steps(batch_size) * batch_size]
            there = order.to(self._device)
        self._walks.append(batch_size)
        if self._reader is not None:
            self._reader.walks = len(self._walks)
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
            # The next walk over an iterable data set may go on here: without these samples it reads the pass anew.
            if not self._walks and self._source is not None and self._reader is None:
                self._source.rest()

    def _walk_resident(
        self,
        tensors: list[Tensor],
        batch_size: int,
        order: Tensor | None,
        first: int,
    ) -> Iterator[Any]:
        end = min(self.samples, self.steps(batch_size) * batch_size)
        # Copies: in-place changes of a batch must not reach the data.
        if order is None:
            for number in range(first, self.steps(batch_size)):
                part = slice(number * batch_size, (number + 1) * batch_size)
                yield [tensor[part].clone() for tensor in tensors]
        else:
            order = order[:end].to(self._device)
            for start in range(first * batch_size, end, CUT_AT_ONCE * batch_size):
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
        if self._source is None and (self._collate is not None or self._reader is not None):
            # Draws of an iterable data set itself are those of its pass.
            whole, collate = self._collate is not None, self._collate or default_collate
            self._source = SampleWindow(self._fetcher, self._device, draws=whole, whole=whole, collate=collate)
        elif self._source is None:
            self._source = self._probed(range(min(self._rows, LOOKED_AT)))
        return self._source

    def _probed(self, indices: Sequence[int]) -> BatchSource:
        """The source for samples such as these. All generators are restored."""
        others = PythonRngSnapshot()
        with forked_rng([torch.device(self._device).index or 0] if self._device.type == "cuda" else []):
            try:
                return self._source_for(indices)
            except DrawsError:
                return self._drawing()
            finally:
                others.restore()

    def _source_for(self, indices: Sequence[int]) -> BatchSource:
        samples, alike = self._fetcher.look(indices)
        if not alike:
            _log.warning(
                "the %s set returns different samples for the same index, but draws nothing from the generators that "
                "are seeded: a trial may differ alone and in an array; draw from torch's default generator instead",
                self._name,
            )
            return self._drawing()
        size = None
        if all(kind(sample) == kind(samples[0]) for sample in samples):
            size = materialized_bytes(default_collate(samples), len(samples), self._rows)
        if size is None or size > RESIDENT_BYTES:
            return SampleWindow(self._fetcher, self._device)
        return MaterializedSource(self._fetcher, self._rows, samples[:1], self._device)

    def _drawing(self) -> BatchSource:
        return SampleWindow(self._fetcher, self._device, draws=True, whole=not self._shared_augmentation)


def _tensors(dataset: Dataset[Any]) -> list[Tensor] | None:
    """The tensors of a `TensorDataset`, or of a `Subset` of one; None for any other data set."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is Subset and (whole := _tensors(dataset.dataset)) is not None:
        return [tensor[torch.as_tensor(dataset.indices)] for tensor in whole]
    return None
