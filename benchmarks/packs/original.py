"""One configuration after another: a plain PyTorch program that searches, in one process, with all cores."""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
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
    for epoch in range(member.start, member.target):
        model.train()
        total = torch.zeros(())
        for batch in batches(sets[0], size, epoch_order(len(sets[0]), trial.data_seed, epoch)):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        metrics = _validated(model, sets[1], size)
        if not math.isfinite(float(total)):
            yield Report(trial.number, epoch + 1, metrics, state=TrialState.FAILED, reason="the loss is not finite")
            return
        reached = epoch + 1 == member.target
        yield Report(trial.number, epoch + 1, metrics, state=TrialState.PAUSED if reached else TrialState.RUNNING)


@torch.no_grad()
def _validated(model: nn.Module, dataset: Dataset[Any], size: int) -> dict[str, float]:
    model.eval()
    loss, correct, samples = torch.zeros(()), torch.zeros((), dtype=torch.int64), len(dataset)
    for x, y in batches(dataset, size, torch.arange(samples)):
        scores: Tensor = model(x)
        loss = loss + nn.functional.cross_entropy(scores, y, reduction="sum")
        correct += (scores.argmax(1) == y).sum()
    return {METRIC: float(loss) / samples, "accuracy": int(correct) / samples}
