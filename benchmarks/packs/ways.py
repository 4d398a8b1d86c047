"""The ways of training that a pack of Shoal's is held against: one after another, and the paper's pack."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from packs.cases import Cell
from packs.pictures import Files
from packs.tasks import batches
from shoal.train.data.loader import epoch_order

__all__ = ["MOST_ROUNDS", "Learner", "Paper", "Sequential", "Way", "measured", "speed_of"]

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

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.epochs = 0
        self.decoded = 0
        """Files decoded in the last epoch."""

    @abstractmethod
    def epoch(self, number: int) -> None:
        """Train every member on its whole training set, in the order of this epoch."""

    @abstractmethod
    def sources(self) -> Iterable[Dataset[Any]]:
        """The data sets that it reads."""

    def _count(self) -> int:
        return sum(each.decoded for each in self.sources() if isinstance(each, Files) and each.name == "train")

    def run(self) -> float:
        """Seconds of the next epoch."""
        before = self._count()
        began = time.perf_counter()
        self.epoch(self.epochs)
        seconds = time.perf_counter() - began
        self.decoded = self._count() - before
        self.epochs += 1
        return seconds


class PlainWay(Way):
    """One that trains models of plain PyTorch by a loop in this process."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.task = cell.task
        self.sets: dict[int, tuple[Dataset[Any], Dataset[Any]]] = {}
        self.learners = []
        for number, config in enumerate(cell.configs):
            torch.manual_seed(number)
            model = self.task.model(config).train().to(cell.device)
            optimizer = self.task.optimizer(model, config)
            self.learners.append(Learner(model, optimizer, config["batch_size"], config["part"]))
            if config["part"] not in self.sets:
                train, valid = map(self._placed, self.task.data(config))
                self.sets[config["part"]] = train, valid

    def _placed(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """The data set on the device, where it consists of tensors."""
        if not isinstance(dataset, TensorDataset):
            return dataset
        return TensorDataset(*(tensor.to(self.cell.device) for tensor in dataset.tensors))

    def batches(self, dataset: Dataset[Any], size: int, order: Tensor) -> Iterator[list[Tensor]]:
        """Batches on the device."""
        for batch in batches(dataset, size, order):
            yield [tensor.to(self.cell.device, non_blocking=True) for tensor in batch]

    @torch.no_grad()
    def validate(self) -> None:
        """What ends an epoch of any training: the metrics of every member, as numbers."""
        for learner in self.learners:
            learner.model.eval()
            for batch in self.batches(self.sets[learner.part][1], learner.batch_size, torch.arange(1)):
                for value in (self.task.loss(learner.model, batch), *self.task.metrics(learner.model, batch).values()):
                    float(value)
            learner.model.train()

    def sources(self) -> Iterable[Dataset[Any]]:
        return [each for both in self.sets.values() for each in both]

    def order(self, number: int) -> Tensor:
        return epoch_order(self.cell.samples, 0, number).to(self.cell.device)


class Sequential(PlainWay):
    """Members one after another, each with a loader of its own."""

    def epoch(self, number: int) -> None:
        for learner in self.learners:
            for batch in self.batches(self.sets[learner.part][0], learner.batch_size, self.order(number)):
                learner.optimizer.zero_grad()
                self.task.loss(learner.model, batch).backward()
                learner.optimizer.step()
        self.validate()


Portion = list[tuple[Learner, list[Tensor]]]
"""Who takes part in a step, and the batch of each."""


class Paper(PlainWay):
    """The paper's pack: all members take their steps together, by one backward pass over the sum of their losses.

    Members of one data set share a stream, members of another have another.
    """

    def epoch(self, number: int) -> None:
        streams = [
            self.stream([learner for learner in self.learners if learner.part == part], train, self.order(number))
            for part, (train, _) in self.sets.items()
        ]
        for portions in zip_longest(*streams, fillvalue=()):
            step = [taking for portion in portions for taking in portion]
            for learner, _ in step:
                learner.optimizer.zero_grad()
            torch.stack([self.task.loss(learner.model, batch) for learner, batch in step]).sum().backward()
            for learner, _ in step:
                learner.optimizer.step()
        self.validate()

    def stream(
        self, learners: Sequence[Learner], dataset: Dataset[tuple[Tensor, Tensor]], order: Tensor
    ) -> Iterator[Portion]:
        """The steps of an epoch of those who share a data set (section 3.2 of the paper).

        The member of the largest batch draws it; the others take as many of its first samples as they need. When that
        member has done its epoch, the one of the next largest batch draws from what it has not used. Whoever has a
        smaller batch has not used that either.
        """
        unused = dict.fromkeys(learners, order)
        while unused:
            size = max(learner.batch_size for learner in unused)
            (rest, *_) = (unused.pop(learner) for learner in list(unused) if learner.batch_size == size)
            drawn = rest.split(size)
            behind = [learner for learner in learners if learner.batch_size <= size]
            for batch in self.batches(dataset, size, rest):
                yield [(learner, [tensor[: learner.batch_size] for tensor in batch]) for learner in behind]
            for learner, left in unused.items():
                used = torch.cat([part[: learner.batch_size] for part in drawn])
                unused[learner] = left[~torch.isin(left, used)]
            unused = {learner: left for learner, left in unused.items() if len(left)}


def speed_of(way: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast a way is as another one: the median of what the rounds showed."""
    return median(theirs / its for theirs, its in zip(other, way, strict=True))


def measured(ways: Mapping[str, Way], rounds: int, limit: float) -> dict[str, list[float]]:
    """Seconds of interleaved epochs of all ways, round by round, the first of each left out.

    Each way comes as often after one as after another, and never after itself, for what is left in the caches is a part
    of what an epoch takes.

    Args:
        ways: Name of a way -> the way; at most three.
        rounds: Least number of rounds, even.
        limit: Seconds after which no more than these are made.
    """
    for way in ways.values():
        way.run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    first, *others = ways
    began = time.perf_counter()
    while (made := len(seconds[first])) < rounds or (made < MOST_ROUNDS and time.perf_counter() - began < limit):
        for name in (first, *others, first, *reversed(others)):
            seconds[name].append(ways[name].run())
    return seconds
