"""Loader processes: worker processes of torch's `DataLoader` that fetch samples while the main process trains.

Samples come back in shared memory.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # registers tensors in shared memory with `ForkingPickler`
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from shoal.fuse.generators import DrawDetector, PythonRngSnapshot, generator_lock, seed_all
from shoal.train.data.loader import LoaderSettings
from shoal.train.data.samples import copy_sample, samples_equal
from shoal.train.data.source import RandomSampleError

__all__ = ["FetchRequest", "LoaderProcesses", "deserialize", "serialize"]


@dataclass(frozen=True)
class _Slice:
    """Position of a tensor or array in shared memory: dtype, first element, shape, and whether it is a NumPy array."""

    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    array: bool


_SMALL = 16
"""Maximum bytes of an array that is pickled by value."""


def serialize(value: Any) -> bytes:
    """Serialize samples or a batch, with all tensors of one dtype in one block of shared memory.

    Torch sends each tensor with its own file descriptor, of which a process may open fewer than a block has tensors.
    The receiver must call `deserialize` exactly once, while this process is alive.
    """
    leaves, spec = pytree.tree_flatten(value)
    parts: dict[torch.dtype, list[Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for place, leaf in enumerate(leaves):
        tensor = _dense(leaf)
        if tensor is None:
            continue
        first = filled.get(tensor.dtype, 0)
        parts.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        filled[tensor.dtype] = first + tensor.numel()
        leaves[place] = _Slice(tensor.dtype, first, tuple(tensor.shape), type(leaf) is np.ndarray)
    memories = {dtype: torch.cat(some) for dtype, some in parts.items()}
    return bytes(ForkingPickler.dumps((memories, pytree.tree_unflatten(leaves, spec))))


def deserialize(packed: bytes) -> Any:
    """Return the serialized value, whose tensors in shared memory may each be changed in place."""
    memories, value = ForkingPickler.loads(packed)
    return pytree.tree_map_only(_Slice, lambda place: _tensor_at(memories[place.dtype], place), value)


def _dense(leaf: Any) -> Tensor | None:
    """Return the tensor of a leaf that shared memory can hold; None for any other leaf."""
    if type(leaf) is np.ndarray and leaf.nbytes > _SMALL and leaf.dtype.isnative and leaf.dtype.kind in "biuf":
        leaf = torch.from_numpy(np.require(leaf, requirements=["C", "W"]))
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return None
    return None if leaf.requires_grad or leaf.is_quantized else leaf.resolve_conj().resolve_neg()


def _tensor_at(memory: Tensor, place: _Slice) -> Any:
    # Not a view: autograd would count an in-place change of a view as a change of all other tensors of the memory.
    view = memory[place.first : place.first + math.prod(place.shape)].view(place.shape)
    tensor = torch.empty(0, dtype=place.dtype)
    tensor.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    return tensor.numpy() if place.array else tensor


MAX_KNOWN_PER_PENDING = 16
"""Maximum number of known requests per request that may be pending."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FetchRequest:
    """Request to a loader process for some samples.

    Args:
        key: Key of the request; requests with equal keys are for the same samples.
        seed: Seed of the generators before the first sample; None to leave the generators unchanged.
        check_repeatable: Whether to fetch the samples twice, one by one and in a row, and also return whether both are
            equal.
    """

    key: Hashable
    indices: Sequence[int] = field(compare=False)
    seed: int | None = field(default=None, compare=False)
    random_samples: bool = field(default=False, compare=False)
    collate: bool = field(default=False, compare=False)
    check_repeatable: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class _Answer:
    request: FetchRequest
    content: Any = None
    unexpected_draws: bool = False
    error: ExceptionWrapper | None = None

    def value(self) -> Any:
        if self.error is not None:
            self.error.reraise()  # type: ignore[no-untyped-call]
        if self.unexpected_draws:
            raise RandomSampleError
        return self.content


class LoaderProcesses:
    """Processes that fetch samples in advance. They start with the first request and end with this object.

    Torch's `DataLoader` takes the next request whenever it returns an answer, and returns answers in the order of the
    requests. So the number of pending requests is constant: requests that were made, requests that are likely to be
    next, and empty requests if none is known.

    The processes are forked, so the data set need not be pickled and no module is imported again.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], name: str, settings: LoaderSettings
    ) -> None:
        self._name = name
        self.prefetch_limit = settings.num_workers * settings.prefetch_factor
        self._queue: deque[FetchRequest] = deque()
        self._by_key: dict[Hashable, _Answer | None] = {}  # None while pending
        self._answers: Iterator[_Answer | None] | None = None
        self._loader = DataLoader(
            _FetchDataset(dataset, collate, name),
            batch_size=None,
            sampler=_RequestSampler(self._queue),
            collate_fn=_identity,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            persistent_workers=True,
            multiprocessing_context="fork",
            worker_init_fn=settings.worker_init_fn,
            generator=torch.Generator(),  # else the loader draws from the default generator
        )

    def get(self, wanted: FetchRequest, upcoming: Iterable[FetchRequest] = ()) -> tuple[Sequence[int], Any]:
        """Fetch samples, and request others that are likely to be next, the most likely first, in advance.

        Returns the indices of the samples, as in the first request with this key, and the samples or the batch. Raises
        RandomSampleError for draws that the request does not allow, and whatever the user's code raised.
        """
        while len(self._by_key) > MAX_KNOWN_PER_PENDING * self.prefetch_limit:  # answers for iterators that ended early
            del self._by_key[next(iter(self._by_key))]
        self._enqueue(wanted, first=True)
        for request in upcoming:
            self._enqueue(request)
        while (answer := self._by_key[wanted.key]) is None:
            received = self._next()
            if received is not None and received.request.key in self._by_key:
                self._by_key[received.request.key] = received
        del self._by_key[wanted.key]
        return answer.request.indices, answer.value()

    def drop_prefetched(self) -> None:
        """Drop all samples that were fetched in advance, and all requests."""
        self._queue.clear()
        self._by_key.clear()

    def _enqueue(self, request: FetchRequest, first: bool = False) -> None:
        if request.key not in self._by_key:
            self._by_key[request.key] = None
            (self._queue.appendleft if first else self._queue.append)(request)

    def _next(self) -> _Answer | None:
        try:
            if self._answers is None:
                with generator_lock:  # so that no other thread holds this lock during the fork
                    self._answers = iter(self._loader)
            answer = next(self._answers)
            if answer is None or answer.content is None:
                return answer
            return replace(answer, content=deserialize(answer.content))
        except BaseException as error:
            self._shut_down()  # a process was killed, or this one interrupted; the next request starts new processes
            if isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
                raise RuntimeError(
                    f"a DataLoader worker of the {self._name} set has ended before its samples were received; it may "
                    "have been killed for want of memory: lower `num_workers` or `loader_workers`"
                ) from error
            raise

    def _shut_down(self) -> None:
        """End the processes and drop all requests. One of the processes may have been killed."""
        iterator: Any = self._answers
        self._answers = self._loader._iterator = None
        self.drop_prefetched()
        if iterator is not None:
            with suppress(RuntimeError):  # torch may notice only now that a process was killed
                iterator._shutdown_workers()


class _RequestSampler:
    """Sampler of the loader: it yields the requests of a queue, and None while the queue is empty."""

    def __init__(self, queue: deque[FetchRequest]) -> None:
        self._queue = queue

    def __iter__(self) -> Iterator[FetchRequest | None]:
        while True:
            yield self._queue.popleft() if self._queue else None


class _FetchDataset(Dataset[Any]):
    """Data set of the loader, which runs in the loader processes. Its index is a request, its sample an answer."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], name: str) -> None:
        self._dataset = dataset
        self._collate = collate
        self._name = name
        self._place = ""

    def __getitem__(self, request: FetchRequest | None) -> _Answer | None:
        if request is None:
            return None
        try:
            return self._answer(request)
        except (Exception, SystemExit):  # raised again in the main process, if it needs these samples
            where = f"in a loader process, {self._place}"
            return _Answer(request, error=ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]

    def _answer(self, request: FetchRequest) -> _Answer:
        torchs, others = DrawDetector(_CPU), PythonRngSnapshot()
        if request.seed is not None:
            seed_all(request.seed, _CPU)
        value: Any = None
        if request.check_repeatable:
            one_by_one = [copy_sample(*self._samples([index])) for index in request.indices]
            samples = self._samples(request.indices)
            value = samples, all(map(samples_equal, one_by_one, samples))
        else:
            value = self._samples(request.indices)
        if not request.random_samples and (torchs() or others.has_drawn()):
            return _Answer(request, unexpected_draws=True)
        if request.collate:
            self._place = f"when it made a batch of samples {list(request.indices)} of the {self._name} set"
            value = self._collate(value)
        self._place = f"when it sent samples {list(request.indices)} of the {self._name} set"
        return _Answer(request, serialize(value))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        samples = []
        for index in indices:
            self._place = f"for sample {index} of the {self._name} set"
            samples.append(self._dataset[index])
        return samples


def _identity(answer: Any) -> Any:
    return answer
