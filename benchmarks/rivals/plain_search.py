"""The plain rivals of a whole search: a loop in one process, and a pool of processes.

Both ask the algorithm object that a study has, so trials, seeds, orders of samples and budgets are those of the study.
A trial is trained by a plain PyTorch loop over tensors in the memory of the device.
"""

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shoal
from shoal.algorithms.base import Algorithm
from shoal.core.array import Member
from shoal.core.space import Space
from shoal.core.trial import Report, TrialState, derive_seed
from shoal.train.data.loader import epoch_order
from shoal.train.trial_runtime import build

__all__ = ["Asked", "PlainSearch", "in_a_loop", "in_processes"]

Sets = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Tensors of the training and of the validation set."""


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """What is searched.

    Args:
        task: Task, whose data do not depend on the config.
        space: Search space.
        algorithm: Algorithm that no search has used yet.
        metric: Metric of the search.
        mode: "max" or "min".
        seed: Seed of the study.
        device: Device of models and data.
    """

    task: shoal.Task
    space: Mapping[str, Any]
    algorithm: Algorithm
    metric: str
    mode: str
    seed: int
    device: torch.device = CPU

    def begin(self) -> Sets:
        """Bind the algorithm as a study does, and load the data."""
        data_seed = derive_seed(self.seed, "data")
        self.algorithm.bind(Space(self.space), metric=self.metric, mode=self.mode, seed=self.seed, data_seed=data_seed)
        train, valid = self.task.data({})
        return train.tensors, valid.tensors


@dataclass
class PlainSearch:
    """How a search went.

    Args:
        asked: What was searched.
        began: Time of its call, of `time.time`.
        timeline: Seconds since the call, and the value of the metric: one for each epoch of each trial, in order.
    """

    asked: Asked
    began: float = field(default_factory=time.time)
    timeline: list[tuple[float, float]] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Best value that a trial has reported, as `Study.best_trial` has it."""
        return (max if self.asked.mode == "max" else min)(value for _, value in self.timeline)

    def report(self, member: Member, epoch: int, metrics: Mapping[str, float]) -> None:
        """Note the end of an epoch, and let the algorithm decide."""
        value = metrics[self.asked.metric]
        self.timeline.append((time.time() - self.began, value))
        state = TrialState.PAUSED if epoch == member.target else TrialState.RUNNING
        self.asked.algorithm.observe(Report(member.trial.number, epoch, metrics, state=state))


class PlainTrial:
    """A trial as a plain script trains it.

    Args:
        task: Task, of which it uses the methods that say what is trained.
        metric: Metric to report.
        sets: Data of the task, on the device of the training.
        member: Trial, with the epochs that it begins and ends with.
    """

    def __init__(self, task: shoal.Task, metric: str, sets: Sets, member: Member) -> None:
        self._device = sets[0][0].device
        runtime = build(task, member, self._device)
        self.model, self.optimizer, self.settings = runtime.model, runtime.optimizer, runtime.settings
        self.scheduler = runtime.scheduler
        self._task, self._metric, self._sets, self._trial = task, metric, sets, member.trial
        self._own_step = type(task).step is not shoal.Task.step

    def epochs(self, member: Member) -> Iterator[tuple[int, dict[str, float]]]:
        """Train to the target; yields each epoch with its metrics."""
        for epoch in range(member.start, member.target):
            self.model.train()
            order = epoch_order(len(self._sets[0][0]), self._trial.data_seed, epoch).to(self._device)
            for part in order.split(self.settings.batch_size):
                self._step(tuple(tensor[part] for tensor in self._sets[0]))
            if self.scheduler is not None:
                self.scheduler.step()
            yield epoch + 1, {self._metric: self._validated()}

    def _step(self, batch: tuple[Tensor, ...]) -> None:
        if self._own_step:
            self._task.step(self.model, batch, self.optimizer)
            return
        self.optimizer.zero_grad()
        self._task.loss(self.model, batch).backward()
        if self.settings.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
        self.optimizer.step()

    def _validated(self) -> float:
        total, size = torch.zeros((), dtype=torch.float64, device=self._device), self.settings.eval_batch_size
        self.model.eval()
        with torch.no_grad():
            for batch in zip(*(tensor.split(size) for tensor in self._sets[1]), strict=True):
                if self._metric == "valid_loss":
                    value = self._task.loss(self.model, batch)
                else:
                    value = self._task.metrics(self.model, batch)[self._metric]
                total += value.double() * len(batch[0])
        return float(total) / len(self._sets[1][0])

    def save(self, path: Path) -> None:
        """Write weights, and the state of optimizers and scheduler."""
        torch.save([part.state_dict() for part in self._parts()], path)

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        for part, state in zip(self._parts(), torch.load(path), strict=True):
            part.load_state_dict(state)

    def _parts(self) -> list[Any]:
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        return [self.model, *optimizers, *([] if self.scheduler is None else [self.scheduler])]


def in_a_loop(asked: Asked) -> PlainSearch:
    """Train one configuration after another in this process; those that go on later stay in memory."""
    search = PlainSearch(asked)
    sets = _moved(asked.begin(), asked.device)
    trials: dict[int, PlainTrial] = {}
    done: dict[int, int] = {}
    while not asked.algorithm.finished:
        for group in asked.algorithm.next_groups(1):
            for trial in group.trials:
                member = Member(trial, done.get(trial.number, 0), group.budget.epochs)
                if trial.number not in trials:
                    trials[trial.number] = PlainTrial(asked.task, asked.metric, sets, member)
                for epoch, metrics in trials[trial.number].epochs(member):
                    search.report(member, epoch, metrics)
                done[trial.number] = member.target
    return search


def in_processes(
    asked: Asked,
    folder: Path,
    slots: int,
    method: str = "fork",
    reuse: bool = True,
    environment: Mapping[str, str] | None = None,
) -> PlainSearch:
    """Train a configuration in each of some processes; those that go on later are loaded from files.

    Args:
        asked: What is searched.
        folder: Folder of the files.
        slots: Number of processes at a time.
        method: "fork" for processes that have all imports and the data, "spawn" for ones that begin anew.
        reuse: Whether a process takes one configuration after another; else each trains one up to its target.
        environment: Variables of the processes, set before they use the device.
    """
    search = PlainSearch(asked)
    sets = asked.begin()
    context = multiprocessing.get_context(method)
    waiting: deque[Member] = deque()
    done: dict[int, int] = {}
    idle: list[Connection] = []
    running: dict[Connection, Member] = {}
    while not asked.algorithm.finished:
        for group in asked.algorithm.next_groups(slots - len(running)):
            waiting += (Member(trial, done.get(trial.number, 0), group.budget.epochs) for trial in group.trials)
        while waiting and len(running) < slots:
            connection = idle.pop() if idle else _begun(context, (asked, sets, folder, environment or {}))
            member = waiting.popleft()
            connection.send((member, reuse))
            running[connection] = member
        for connection in wait(list(running)):
            member = running[connection]
            try:
                message = connection.recv()
            except EOFError:
                del running[connection]
                continue
            if message is None:
                idle.append(connection)
                del running[connection]
                continue
            epoch, metrics = message
            search.report(member, epoch, metrics)
            done[member.trial.number] = epoch
    for connection in running if reuse else ():
        connection.recv()  # after its last report it says that it is idle
    for connection in (*idle, *running) if reuse else ():
        connection.send(None)
    return search


def _begun(context: Any, given: tuple[Any, ...]) -> Connection:
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(*given, theirs), daemon=True).start()
    theirs.close()
    return ours


def _moved(sets: Sets, device: torch.device) -> Sets:
    train, valid = (tuple(tensor.to(device) for tensor in part) for part in sets)
    return train, valid


def _serve(asked: Asked, sets: Sets, folder: Path, environment: Mapping[str, str], connection: Connection) -> None:
    """Train the members that arrive, each up to its target."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    sets = _moved(sets, asked.device)
    again = True
    while again and (request := connection.recv()) is not None:
        member, again = request
        trial = PlainTrial(asked.task, asked.metric, sets, member)
        path = folder / f"{member.trial.number}.pt"
        if path.exists():
            trial.load(path)
        for epoch, metrics in trial.epochs(member):
            if epoch == member.target:
                trial.save(path)
            connection.send((epoch, metrics))
        if again:
            connection.send(None)
