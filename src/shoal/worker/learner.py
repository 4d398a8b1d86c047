"""A trial as a worker holds it: the user's model, optimizer and scheduler, and how far they have come."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.errors import TaskError
from shoal.planner.job import Member
from shoal.task import Task
from shoal.trial import Config, Report, Trial
from shoal.worker.checkpoint import Checkpoint, load_newest, save

__all__ = ["Learner", "batch_size", "build", "checked", "reseed", "wait"]


@dataclass(eq=False)
class Learner:
    """A trial in training.

    Args:
        member: the trial, and where it is to stop.
        model: the user's.
        optimizer: the user's.
        scheduler: the user's, or None.
        device: that all of them are on.
        epoch: epochs finished.
        step: steps done of the next one.
        reports: of all epochs so far.
    """

    member: Member
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any | None
    device: torch.device
    epoch: int = 0
    step: int = 0
    reports: list[Report] = field(default_factory=list)

    @property
    def trial(self) -> Trial:
        """The trial that learns here."""
        return self.member.trial

    def end_epoch(self, metrics: dict[str, float], seconds: float) -> Report:
        """Step the scheduler and note what the epoch showed."""
        self.epoch, self.step = self.epoch + 1, 0
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics["valid_loss"])
        elif self.scheduler is not None:
            self.scheduler.step()
        self.reports.append(Report(self.trial.number, self.epoch, metrics, seconds))
        return self.reports[-1]

    def save(self, directory: Path) -> None:
        """Write a checkpoint."""
        state = Checkpoint(
            self.epoch,
            self.step,
            self.model.state_dict(),
            self.optimizer.state_dict(),
            None if self.scheduler is None else self.scheduler.state_dict(),
            tuple(self.reports),
        )
        save(directory, self.trial.number, state)

    def restore(self, directory: Path) -> None:
        """Go on from the newest checkpoint, if there is one."""
        state = load_newest(directory, self.trial.number)
        if state is None:
            return
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        if self.scheduler is not None and state.scheduler is not None:
            self.scheduler.load_state_dict(state.scheduler)
        self.epoch, self.step, self.reports = state.epoch, state.step, list(state.reports)


def build(task: Task, member: Member, device: torch.device) -> Learner:
    """A trial at its very start: torch seeded with its seed, then the user's `model` and `optimizer`.

    Raises:
        TaskError: a method of the task returns something else than it should.
    """
    config = member.trial.config
    torch.manual_seed(member.trial.seed)
    model = checked("model", task.model(config), nn.Module).to(device).train()
    optimizer = checked("optimizer", task.optimizer(model, config), Optimizer)
    scheduler = task.scheduler(optimizer, config)
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TaskError(f"the task's `scheduler` must return a torch LR scheduler or None, got {scheduler!r}")
    return Learner(member, model, optimizer, scheduler, device)


def batch_size(task: Task, config: Config) -> int:
    """Samples per step of a configuration.

    Raises:
        TaskError: it is no positive integer.
    """
    size: int = checked("batch_size", task.batch_size(config), int)
    if size < 1:
        raise TaskError(f"the task's `batch_size` must return a positive integer, got {size}")
    return size


def reseed(seed: int, device: torch.device) -> None:
    """Seed the generators of Python, NumPy and torch, which user code draws from.

    `torch.manual_seed` does the same for torch, and takes half a millisecond for it.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def wait(device: torch.device) -> None:
    """Let the device finish, so that a clock tells how long it took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def checked(method: str, value: Any, kind: type) -> Any:
    """What a method of the task returned.

    Raises:
        TaskError: it is not of the kind it should be.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TaskError(f"the task's `{method}` must return {_name(kind)}, got {value!r}")
    return value


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
