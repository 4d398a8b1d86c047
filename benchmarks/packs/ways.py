"""The ways of training the members of a case: one after another, the paper's pack, and Shoal."""

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from packs.tasks import Case
from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Reported
from shoal.core.trial import Trial
from shoal.host.discover import discover
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.costs import Costs
from shoal.plan.cost.history import History
from shoal.plan.partition import partition
from shoal.plan.waiting import WaitingClass
from shoal.train.array_trainer import ArrayTrainer, WorkerState
from shoal.train.data.datasets import DataSets
from shoal.train.data.loader import epoch_order
from shoal.train.lane_scheduler import LaneScheduler
from shoal.train.profile import measure
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache

__all__ = ["MOST_ROUNDS", "Chosen", "Learner", "Paper", "Sequential", "Way", "measured", "speed_of"]

MOST_ROUNDS = 60
"""A case has no more rounds, however short its epochs are."""


@dataclass(frozen=True, eq=False)
class Learner:
    model: nn.Module
    optimizer: Optimizer
    batch_size: int
    part: int


class Way(ABC):
    """Trains the members of a case; made once, then timed for an epoch again and again."""

    def __init__(self, case: Case) -> None:
        self.case = case
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


class Paper(Way):
    """The paper's pack: all members take their steps together, by one backward pass over the sum of their losses.

    Members of one data set share a stream, members of another have another.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.task = case.task
        self.sets: dict[int, list[list[Tensor]]] = {}
        self.learners = []
        for number, config in enumerate(case.configs):
            torch.manual_seed(number)
            model = self.task.model(config).train().to(case.device)
            optimizer = self.task.optimizer(model, config)
            self.learners.append(Learner(model, optimizer, config["batch_size"], config["part"]))
            if config["part"] not in self.sets:
                sets = self.task.data(config)
                self.sets[config["part"]] = [[column.to(case.device) for column in each.tensors] for each in sets]

    def packs(self) -> list[list[Learner]]:
        """Members that train together."""
        return [self.learners]

    def epoch(self, number: int) -> None:
        order = epoch_order(self.case.samples, 0, number)
        for pack in self.packs():
            streams = [
                self.stream([learner for learner in pack if learner.part == part], train, order)
                for part, (train, _) in self.sets.items()
            ]
            for portions in zip_longest(*streams, fillvalue=()):
                step = [taking for portion in portions for taking in portion]
                for learner, _ in step:
                    learner.optimizer.zero_grad()
                torch.autograd.backward([self.task.loss(learner.model, batch) for learner, batch in step])
                for learner, _ in step:
                    learner.optimizer.step()
        self.validate()

    @torch.no_grad()
    def validate(self) -> None:
        """End an epoch as any training does: compute the loss of every member, as a number."""
        for learner in self.learners:
            learner.model.eval()
            for batch in self.batches(self.sets[learner.part][1], learner.batch_size, torch.arange(1)):
                float(self.task.loss(learner.model, batch))
            learner.model.train()

    def batches(self, columns: list[Tensor], size: int, order: Tensor) -> Iterator[list[Tensor]]:
        """Batches on the device."""
        for part in order.to(columns[0].device).split(size):
            yield [column[part].to(self.case.device, non_blocking=True) for column in columns]

    def stream(
        self, learners: Sequence[Learner], columns: list[Tensor], order: Tensor
    ) -> Iterator[list[tuple[Learner, list[Tensor]]]]:
        """The steps of an epoch of those who share a data set (section 3.2 of the paper): each one's batches.

        The member of the largest batch draws it; the others take as many of its first samples as they need. When that
        member has done its epoch, the one of the next largest batch draws from what it has not used. Whoever has a
        smaller batch has not used that either.
        """
        unused = dict.fromkeys(learners, order)
        while unused:
            size = max(learner.batch_size for learner in unused)
            (rest, *_) = (unused.pop(learner) for learner in list(unused) if learner.batch_size == size)
            behind = [learner for learner in learners if learner.batch_size <= size]
            for batch in self.batches(columns, size, rest):
                yield [(learner, [tensor[: learner.batch_size] for tensor in batch]) for learner in behind]
            for learner, left in unused.items():
                used = torch.cat([part[: learner.batch_size] for part in rest.split(size)])
                unused[learner] = left[~torch.isin(left, used)]
            unused = {learner: left for learner, left in unused.items() if len(left)}


class Sequential(Paper):
    """Members one after another, each of which reads its data itself."""

    def packs(self) -> list[list[Learner]]:
        return [[learner] for learner in self.learners]


class Chosen(Way):
    """A case's members as Shoal trains them: arrays, in as many packs as a search on one device would have.

    After `settled` epochs the choices that are still open are not waited for; by 30, almost all are made. Trials have
    `planned` epochs left, by which it is judged whether to compile pays.
    """

    def __init__(self, case: Case, settled: int = 30, planned: int = 1_000_000) -> None:
        super().__init__(case)
        task, place = case.task, case.device
        sets = DataSets(task, place)
        trials = [Trial(number, config, seed=number, data_seed=0) for number, config in enumerate(case.configs)]
        keys, *_ = SignatureBuilder(task, sets).find_keys(trials)
        members: dict[FusionKey, list[Member]] = {}
        for trial in trials:
            members.setdefault(keys[trial.number], []).append(Member(trial, 0, planned))
        worker_state = WorkerState(task, sets, TrialCache(), place, Path(tempfile.mkdtemp()))
        device = next(iter(discover(str(place) if place.type == "cuda" else "cpu:1")))[1]
        history = History("")
        for key, some in members.items():
            profile = measure(worker_state, Array(key, tuple(some)), device.memory)
            history.put(key.structure, key.data, key.batch_size, device.kind, profile)
        waiting = [WaitingClass(key, tuple(some)) for key, some in members.items()]
        arrays = partition(waiting, Costs(history), [device], {}).arrays
        packs = ArrayPacker().packs(arrays, Costs(history), [device], {}, frozenset())
        self.packs = [
            (LaneScheduler(place), [ArrayTrainer("pack", array, worker_state) for array in pack]) for pack in packs
        ]
        while self.epochs < settled and not all(
            turns.interleaving is not None and all(lane.settled for lane in lanes) for turns, lanes in self.packs
        ):
            self.run()

    def epoch(self, number: int) -> None:
        """One of every lane."""
        for turns, lanes in self.packs:
            while left := [lane for lane in lanes if not any(map(_ends_epoch, lane.events))]:
                for lane in left:
                    lane.prepare()
                for failure in turns.round([lane for lane in left if lane.ready], lambda: False):
                    raise failure.error
            for lane in lanes:
                lane.events.clear()


def _ends_epoch(event: object) -> bool:
    return isinstance(event, Reported) and bool(event.reports)


def speed_of(way: Sequence[float], other: Sequence[float]) -> float:
    """Return the speed of a way relative to another one: the median of the rounds."""
    return median(theirs / its for theirs, its in zip(other, way, strict=True))


def measured(ways: Mapping[str, Way], rounds: int, limit: float) -> dict[str, list[float]]:
    """Seconds of interleaved epochs of at most three ways, for some rounds, an even number, and until the time limit.

    The first epoch of each way is left out. Each way comes as often after one as after another, and never after itself,
    for what is left in the caches is a part of what an epoch takes.
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
