"""One configuration after another: a plain PyTorch program that searches, in one process, with all cores."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset, default_collate

from packs.feeds import Feed, indexed
from packs.search import METRIC, Search, driven
from packs.tasks import Cifar
from shoal.algorithms.base import Algorithm
from shoal.core.array import Member
from shoal.core.trial import Report, Trial, TrialState
from shoal.train.data.loader import epoch_order

__all__ = ["Plain", "again", "original"]

ROUNDINGS: tuple[Callable[[Tensor], Tensor], ...] = (lambda part: part.flip(0), lambda part: part.roll(len(part) // 2))
"""Other orders of the samples of a batch."""


class Plain:
    """Trains members by a plain loop. Models and optimizers stay in memory from rung to rung, its kindest case.

    Args:
        task: says what to train.
        feed: makes the batches.
        sets: to train on, and to validate on.
        within: puts the samples of each batch in another order, which changes nothing but rounding.
    """

    def __init__(
        self,
        task: Cifar,
        feed: Feed,
        sets: tuple[Dataset[Any], Dataset[Any]],
        within: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.task, self.feed, self.within = task, feed, within
        self.train, self.valid = sets
        self.samples = {"train": len(self.train), "valid": len(self.valid)}
        self.alive: dict[int, tuple[nn.Module, Optimizer]] = {}

    def __call__(self, member: Member) -> Iterator[Report]:
        """Train a member up to its target; gives a report for each epoch."""
        trial = member.trial
        if trial.number not in self.alive:
            torch.manual_seed(trial.seed)
            model = self.task.model(trial.config)
            self.alive[trial.number] = model, self.task.optimizer(model, trial.config)
        model, optimizer = self.alive[trial.number]
        for epoch in range(member.start, member.target):
            total = self.epoch(model, optimizer, trial, epoch)
            metrics = self.validated(model, self.task.batch_size(trial.config))
            if not math.isfinite(total):
                self.forget(trial.number)
                yield Report(trial.number, epoch + 1, metrics, state=TrialState.FAILED, reason="the loss is not finite")
                return
            reached = epoch + 1 == member.target
            yield Report(trial.number, epoch + 1, metrics, state=TrialState.PAUSED if reached else TrialState.RUNNING)

    def epoch(self, model: nn.Module, optimizer: Optimizer, trial: Trial, epoch: int) -> float:
        """One pass; returns the sum of the losses."""
        model.train()
        size = self.task.batch_size(trial.config)
        order = epoch_order(self.samples["train"], trial.data_seed, epoch)
        if self.within is not None:
            order = torch.cat([self.within(part) for part in order.split(size)])
        total = torch.zeros(())
        for batch in self.feed(self.train, size, order):
            optimizer.zero_grad()
            loss = self.task.loss(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return float(total)

    @torch.no_grad()
    def validated(self, model: nn.Module, size: int) -> dict[str, float]:
        model.eval()
        loss, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for x, y in self.feed(self.valid, size, torch.arange(self.samples["valid"])):
            scores: Tensor = model(x)
            loss = loss + nn.functional.cross_entropy(scores, y, reduction="sum")
            correct += (scores.argmax(1) == y).sum()
        return {METRIC: float(loss) / self.samples["valid"], "accuracy": int(correct) / self.samples["valid"]}

    def forget(self, number: int) -> None:
        self.alive.pop(number, None)


def original(task: Cifar, algorithm: Algorithm, feed: Feed) -> tuple[float, Search]:
    """The whole search; returns seconds and how it went.

    Args:
        task: says what to train; loading its data takes part of the time.
        algorithm: bound to its problem.
        feed: makes the batches.
    """
    torch.manual_seed(algorithm.problem.seed)
    began = time.perf_counter()
    plain = Plain(task, feed, task.data({}))
    search = driven(algorithm, plain, plain.forget)
    return time.perf_counter() - began, search


def again(task: Cifar, make: Callable[[], Algorithm], search: Search) -> list[Search]:
    """The same trials trained as far again, with other roundings: what rounding alone can do to them.

    It follows the rungs of the search whatever the losses are now, so that every loss has its counterparts. Nobody
    times it, so samples are prepared once.

    Args:
        task: as for `original`.
        make: the same algorithm, bound to the same problem.
        search: that `original` did.
    """
    trials = {trial.number: trial for group in make().next_groups(1) for trial in group.trials}
    train, valid = (
        TensorDataset(*default_collate([dataset[i] for i in range(len(dataset))])) for dataset in task.data({})
    )
    searches = []
    for within in ROUNDINGS:
        plain = Plain(task, indexed, (train, valid), within)
        done: dict[int, int] = {}
        searches.append(Search(search.rungs))
        for rung in search.rungs:
            for number in sorted(rung.trials):
                for report in plain(Member(trials[number], done.get(number, 0), rung.epochs)):
                    searches[-1].reports[number, report.epoch] = report
                    done[number] = report.epoch
    return searches
