"""The ways of training that a pack of Shoal's is held against: one after another, and the paper's pack."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from packs.cases import Cell
from packs.feeds import kindest
from shoal.train.data.loader import epoch_order

__all__ = ["MOST_ROUNDS", "Learner", "Paper", "Sequential", "Taken", "Way", "measured"]

MOST_ROUNDS = 60
"""Of a cell, however short its epochs are."""


@dataclass(frozen=True, eq=False)
class Learner:
    """A member in training."""

    model: nn.Module
    optimizer: Optimizer
    batch_size: int
    part: int


class Way(ABC):
    """Trains the members of a cell; made once, then timed for an epoch again and again."""

    name: ClassVar[str]

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.epochs = 0

    @abstractmethod
    def epoch(self, number: int) -> None:
        """Train every member on its whole training set, in the order of this epoch."""

    def run(self) -> float:
        """Seconds of the next epoch."""
        began = time.perf_counter()
        self.epoch(self.epochs)
        self.epochs += 1
        return time.perf_counter() - began


class PlainWay(Way):
    """One that trains models of plain PyTorch by a loop in this process."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.task = cell.task
        self.feed = kindest(cell.case.pipeline)
        self.sets: dict[int, Dataset[tuple[Tensor, Tensor]]] = {}
        self.valid: dict[int, Dataset[tuple[Tensor, Tensor]]] = {}
        self.runtimes = []
        for number, config in enumerate(cell.configs):
            torch.manual_seed(number)
            model = self.task.model(config).train().to(cell.device)
            optimizer = self.task.optimizer(model, config)
            self.runtimes.append(Learner(model, optimizer, config["batch_size"], config["part"]))
            if config["part"] not in self.sets:
                self.sets[config["part"]], self.valid[config["part"]] = map(self._placed, self.task.data(config))

    def _placed(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """The data set on the device, where it consists of tensors."""
        if not isinstance(dataset, TensorDataset):
            return dataset
        return TensorDataset(*(tensor.to(self.cell.device) for tensor in dataset.tensors))

    def batches(self, dataset: Dataset[Any], size: int, order: Tensor) -> Iterator[list[Tensor]]:
        """Batches on the device."""
        for batch in self.feed(dataset, size, order):
            yield [tensor.to(self.cell.device, non_blocking=True) for tensor in batch]

    def validate(self) -> None:
        """What ends an epoch of any training: the metrics of every member, as numbers."""
        for runtime in self.runtimes:
            runtime.model.eval()
            with torch.no_grad():
                for batch in self.batches(self.valid[runtime.part], runtime.batch_size, torch.arange(1)):
                    float(self.task.loss(runtime.model, batch))
                    for metric in self.task.metrics(runtime.model, batch).values():
                        float(metric)
            runtime.model.train()

    def order(self, number: int) -> Tensor:
        return epoch_order(self.cell.samples, 0, number).to(self.cell.device)


class Sequential(PlainWay):
    """Members one after another, each with a loader of its own."""

    name = "seq"

    def epoch(self, number: int) -> None:
        for runtime in self.runtimes:
            for batch in self.batches(self.sets[runtime.part], runtime.batch_size, self.order(number)):
                runtime.optimizer.zero_grad()
                self.task.loss(runtime.model, batch).backward()
                runtime.optimizer.step()
        self.validate()


Portion = list[tuple[Learner, list[Tensor]]]
"""Who takes part in a step, and the batch of each."""


class Paper(PlainWay):
    """The paper's pack: all members take their steps together, by one backward pass over the sum of their losses.

    Members of one data set share a stream, members of another have another.
    """

    name = "pack"

    def epoch(self, number: int) -> None:
        streams = [
            self.stream([runtime for runtime in self.runtimes if runtime.part == part], dataset, self.order(number))
            for part, dataset in self.sets.items()
        ]
        for portions in zip_longest(*streams, fillvalue=()):
            step = [taking for portion in portions for taking in portion]
            for runtime, _ in step:
                runtime.optimizer.zero_grad()
            torch.stack([self.task.loss(runtime.model, batch) for runtime, batch in step]).sum().backward()
            for runtime, _ in step:
                runtime.optimizer.step()
        self.validate()

    def stream(
        self, runtimes: Sequence[Learner], dataset: Dataset[tuple[Tensor, Tensor]], order: Tensor
    ) -> Iterator[Portion]:
        """The steps of an epoch of those who share a data set (section 3.2 of the paper).

        The member of the largest batch draws it; the others take as many of its first samples as they need. When that
        member has done its epoch, the one of the next largest batch draws from what it has not used. Whoever has a
        smaller batch has not used that either.
        """
        unused = dict.fromkeys(runtimes, order)
        while unused:
            size = max(runtime.batch_size for runtime in unused)
            (rest, *_) = (unused.pop(runtime) for runtime in list(unused) if runtime.batch_size == size)
            drawn = rest.split(size)
            behind = [runtime for runtime in runtimes if runtime.batch_size <= size]
            for batch in self.batches(dataset, size, rest):
                yield [(runtime, [tensor[: runtime.batch_size] for tensor in batch]) for runtime in behind]
            for runtime, left in unused.items():
                used = torch.cat([part[: runtime.batch_size] for part in drawn])
                unused[runtime] = left[~torch.isin(left, used)]
            unused = {runtime: left for runtime, left in unused.items() if len(left)}


@dataclass(frozen=True)
class Taken:
    """What the epochs of all ways took in one cell.

    Args:
        cell: that was trained.
        seconds: of every way's epochs, round by round.
    """

    cell: Cell
    seconds: Mapping[str, Sequence[float]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.seconds.values())))

    def per_step(self, way: str) -> float:
        """T_s in seconds, the median."""
        return self.cell.per_step(median(self.seconds[way]))

    def speed(self, way: str, other: str) -> float:
        """How many times as fast a way is as another one: the median of what the rounds showed."""
        return median(theirs / its for theirs, its in zip(self.seconds[other], self.seconds[way], strict=True))


def measured(cell: Cell, makers: Mapping[str, Callable[[Cell], Way]], rounds: int, limit: float) -> Taken:
    """Interleaved epochs of all ways, the first of each left out.

    Each way comes as often after one as after another, and never after itself, for what is left in the caches is a part
    of what an epoch takes.

    Args:
        cell: to be trained.
        makers: of the ways, by name; at most three.
        rounds: at least, an even number.
        limit: seconds after which no more than these are made.
    """
    ways = {name: make(cell) for name, make in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for way in ways.values():
        way.run()
    first, *others = ways
    began = time.perf_counter()
    made = 0
    while made < rounds or (made < MOST_ROUNDS and time.perf_counter() - began < limit):
        for names in ([first, *others], [first, *reversed(others)]):
            for name in names:
                seconds[name].append(ways[name].run())
            made += 1
    return Taken(cell, seconds)
