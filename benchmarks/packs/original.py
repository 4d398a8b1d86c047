"""One configuration after another: a plain PyTorch program that searches, in one process, with all cores."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import shoal
from packs.tasks import METRIC, SPACE, Cifar, batches
from shoal.core.array import Member
from shoal.core.space import Space
from shoal.core.trial import Report, TrialState, derive_seed
from shoal.train.data.loader import epoch_order

__all__ = ["original"]


def original(task: Cifar, most: int, seed: int = 0) -> tuple[float, list[Report]]:
    """Hyperband with the trials of a study of this seed; models and optimizers stay in memory from rung to rung.

    Returns:
        Seconds, and a report for each epoch.
    """
    algorithm = shoal.Hyperband(max_epochs=most, eta=3)
    algorithm.bind(Space(SPACE), metric=METRIC, mode="min", seed=seed, data_seed=derive_seed(seed, "data"))
    began = time.perf_counter()
    sets = task.data({})
    trained: dict[int, tuple[nn.Module, Optimizer]] = {}
    done: dict[int, int] = {}
    reports: list[Report] = []
    while not algorithm.finished:
        for group in algorithm.next_groups(1):
            for trial in group.trials:
                if trial.number not in trained:
                    torch.manual_seed(trial.seed)
                    model = task.model(trial.config)
                    trained[trial.number] = model, task.optimizer(model, trial.config)
                member = Member(trial, done.get(trial.number, 0), group.budget.epochs)
                for report in _reports(task, sets, *trained[trial.number], member):
                    reports.append(report)
                    done[trial.number] = report.epoch
                    algorithm.observe(report)
    return time.perf_counter() - began, reports


def _reports(
    task: Cifar, sets: tuple[Dataset[Any], Dataset[Any]], model: nn.Module, optimizer: Optimizer, member: Member
) -> Iterator[Report]:
    """Train a member up to its target, or until its loss is not finite; gives a report for each epoch."""
    trial, size = member.trial, task.batch_size(member.trial.config)
    for epoch in range(member.start + 1, member.target + 1):
        model.train()
        total = torch.zeros(())
        for batch in batches(sets[0], size, epoch_order(len(sets[0]), trial.data_seed, epoch - 1)):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        metrics = _validated(task, model, sets[1], size)
        if not math.isfinite(float(total)):
            yield Report(trial.number, epoch, metrics, state=TrialState.FAILED, reason="the loss is not finite")
            return
        state = TrialState.PAUSED if epoch == member.target else TrialState.RUNNING
        yield Report(trial.number, epoch, metrics, state=state)


@torch.no_grad()
def _validated(task: Cifar, model: nn.Module, dataset: Dataset[Any], size: int) -> dict[str, float]:
    model.eval()
    sums: Counter[str] = Counter()
    for batch in batches(dataset, size, torch.arange(len(dataset))):
        for name, value in {METRIC: task.loss(model, batch), **task.metrics(model, batch)}.items():
            sums[name] += float(value) * len(batch[0])
    return {name: total / len(dataset) for name, total in sums.items()}
