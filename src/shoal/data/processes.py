"""Loader processes: fetch the samples of a data set beside the process that trains, by torch's `DataLoader`."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from shoal.data.loader import LoaderSettings
from shoal.data.packed import pack, unpack
from shoal.data.samples import copied, same
from shoal.data.source import DrawsError
from shoal.fuse.generators import DrawDetector, PythonRngSnapshot, generator_lock, seed_all

__all__ = ["FetchRequest", "LoaderProcesses"]

STALE = 16
"""Most requests that are known, for each request that may be under way."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FetchRequest:
    """Samples that a loader process fetches together.

    Args:
        key: Key of the request: equal keys stand for the same samples.
        indices: Indices of the samples.
        seed: Seed of the generators before the first sample; None to leave them as they are.
        draws: Whether samples may draw random numbers.
        whole: Whether to make a batch of the samples.
        twice: Whether to fetch the samples one by one and again in a row, and return whether they are equal.
    """

    key: Hashable
    indices: Sequence[int] = field(compare=False)
    seed: int | None = field(default=None, compare=False)
    draws: bool = field(default=False, compare=False)
    whole: bool = field(default=False, compare=False)
    twice: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class _Answer:
    """The answer of a loader process to a request.

    Args:
        request: Request that is answered.
        content: Samples or batch: packed as they are sent, unpacked once they are received.
        drew: Whether samples drew that must not.
        error: What a sample, the collate function or pickling raised.
    """

    request: FetchRequest
    content: Any = None
    drew: bool = False
    error: ExceptionWrapper | None = None

    def value(self) -> Any:
        """The samples or the batch.

        Raises:
            DrawsError: Samples drew that must not.
            Exception: Whatever the data set or the collate function raised.
        """
        if self.error is not None:
            self.error.reraise()  # type: ignore[no-untyped-call]
        if self.drew:
            raise DrawsError
        return self.content


class LoaderProcesses:
    """Processes that fetch samples in advance. They start with the first request, and end with this object.

    Torch's `DataLoader` asks for the next request whenever it hands on an answer, and answers come in the order of the
    requests. So there are always as many requests under way as its prefetching allows: those that were asked for, those
    that are likely to be next, and empty ones where nothing is known to be next.

    The processes are forked: the data set need not be pickled, and nothing is imported again.

    Args:
        dataset: Data set with indices.
        collate: Makes a batch of samples.
        name: Name of the data set, for messages.
        settings: How the data set is read.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], name: str, settings: LoaderSettings
    ) -> None:
        self._name = name
        self.ahead = settings.workers * settings.ahead
        """Number of requests under way."""
        self._asked: deque[FetchRequest] = deque()
        self._known: dict[Hashable, _Answer | None] = {}  # None: under way
        self._answers: Iterator[_Answer | None] | None = None
        self._loader = DataLoader(
            _Fetching(dataset, collate, name),
            batch_size=None,
            sampler=_Feed(self._asked),
            collate_fn=_unchanged,
            num_workers=settings.workers,
            prefetch_factor=settings.ahead,
            persistent_workers=True,
            multiprocessing_context="fork",
            worker_init_fn=settings.start,
            generator=torch.Generator(),  # else it draws from the default one
        )

    def get(self, wanted: FetchRequest, upcoming: Iterable[FetchRequest] = ()) -> tuple[Sequence[int], Any]:
        """Fetch samples, and let others be fetched in advance.

        Args:
            wanted: Request whose samples are returned.
            upcoming: Requests that are likely to be next, the nearest first.

        Returns:
            Indices of the samples, which are those of the first request with this key. The samples, or the batch.

        Raises:
            DrawsError: Samples drew that must not.
            Exception: Whatever the data set or the collate function raised.
        """
        while len(self._known) > STALE * self.ahead:  # of walks that have ended before they took them
            del self._known[next(iter(self._known))]
        self._ask(wanted, first=True)
        for request in upcoming:
            self._ask(request)
        while (answer := self._known[wanted.key]) is None:
            received = self._next()
            if received is not None and received.request.key in self._known:
                self._known[received.request.key] = received
        del self._known[wanted.key]
        return answer.request.indices, answer.value()

    def forget(self) -> None:
        """Drop all samples that were fetched in advance, and all requests."""
        self._asked.clear()
        self._known.clear()

    def _ask(self, request: FetchRequest, first: bool = False) -> None:
        if request.key not in self._known:
            self._known[request.key] = None
            (self._asked.appendleft if first else self._asked.append)(request)

    def _next(self) -> _Answer | None:
        """The next answer, or None for an empty request."""
        try:
            if self._answers is None:
                with generator_lock:  # no other thread holds this lock while the processes are forked
                    self._answers = iter(self._loader)
            answer = next(self._answers)
            if answer is None or answer.content is None:
                return answer
            return replace(answer, content=unpack(answer.content))
        except BaseException as error:
            self._end()  # a process was killed, or this one interrupted: others start at the next request
            if isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
                raise RuntimeError(
                    f"a DataLoader worker of the {self._name} set has ended before its samples were received; it may "
                    "have been killed for want of memory: lower `num_workers` or `loader_workers`"
                ) from error
            raise

    def _end(self) -> None:
        """End the processes, of which one may have been killed, and drop all requests."""
        iterator: Any = self._answers
        self._answers = self._loader._iterator = None
        self.forget()
        if iterator is not None:
            with suppress(RuntimeError):  # torch may note the killed one only now
                iterator._shutdown_workers()


class _Feed:
    """The sampler of the loader: the requests in a queue, and empty ones when there are none."""

    def __init__(self, asked: deque[FetchRequest]) -> None:
        self._asked = asked

    def __iter__(self) -> Iterator[FetchRequest | None]:
        while True:
            yield self._asked.popleft() if self._asked else None


class _Fetching(Dataset[Any]):
    """The data set of the loader, which runs in its processes: an index is a request, a sample an answer."""

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
        except (Exception, SystemExit):  # raised again by the process that trains, if it needs these samples
            where = f"in a loader process, {self._place}"
            return _Answer(request, error=ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]

    def _answer(self, request: FetchRequest) -> _Answer:
        torchs, others = DrawDetector(_CPU), PythonRngSnapshot()
        if request.seed is not None:
            seed_all(request.seed, _CPU)
        value: Any = None
        if request.twice:
            one_by_one = [copied(*self._samples([index])) for index in request.indices]
            samples = self._samples(request.indices)
            value = samples, all(map(same, one_by_one, samples))
        else:
            value = self._samples(request.indices)
        if not request.draws and (torchs() or others.has_drawn()):
            return _Answer(request, drew=True)
        if request.whole:
            self._place = f"when it made a batch of samples {list(request.indices)} of the {self._name} set"
            value = self._collate(value)
        self._place = f"when it sent samples {list(request.indices)} of the {self._name} set"
        return _Answer(request, pack(value))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        samples = []
        for index in indices:
            self._place = f"for sample {index} of the {self._name} set"
            samples.append(self._dataset[index])
        return samples


def _unchanged(answer: Any) -> Any:
    return answer
