"""A small float64 task, and helpers that train its jobs in this process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Reported
from shoal.core.job import Job, JobUpdate, WorkerContext
from shoal.core.trial import Report, Trial
from shoal.task import Task
from shoal.train.checkpoint import Checkpoint, CheckpointWriter, snapshot, write
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.trial_runtime import TrialRuntime, build
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
SAMPLES, SIZE = 10, 4
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Small(Task):
    """Small regression task with three steps per epoch."""

    def data(self, config: Any) -> Any:
        return TensorDataset(X, Y), TensorDataset(X[:6], Y[:6])

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"error": (model(batch[0]) - batch[1]).abs().mean()}

    def batch_size(self, config: Any) -> int:
        return SIZE


def trial(number: int, **config: Any) -> Trial:
    return Trial(number, {"lr": 0.01 * (number + 1), "number": number, **config}, seed=100 + number, data_seed=7)


def runtimes(task: Task, trials: Sequence[Trial]) -> list[TrialRuntime]:
    return [build(task, Member(each, 0, 1), CPU) for each in trials]


class StopsAfter(JobControl):
    """Stops a job after a number of polls; the job polls before each step."""

    def __init__(self, looks: int) -> None:
        super().__init__(prompt=True)
        self.left = looks

    def stopping(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.stop()
        return super().stopping()


class Planned(JobControl):
    """Comes to what is planned when a step has been done.

    Args:
        plan: number of a step of the job, from 1 on -> a change, or None to stop.
    """

    def __init__(self, plan: Mapping[int, JobUpdate | None]) -> None:
        super().__init__(prompt=True)
        self.plan = dict(plan)
        self.step = 0

    def stopping(self) -> bool:
        self.step += 1
        if self.step in self.plan:
            change = self.plan.pop(self.step)
            if change is None:
                self.stop()
            else:
                self.change(change)
        return super().stopping()


def work(
    task: Task,
    directory: Path,
    members: Sequence[Member],
    control: JobControl | None = None,
    trial_cache: TrialCache | None = None,
) -> list[Report]:
    """Return the reports of the trials of a job."""
    sets = DataSets(task, CPU)
    directory.mkdir(parents=True, exist_ok=True)
    worker_state = WorkerState(task, sets, trial_cache or TrialCache(), CPU, directory)
    job = Job("job", (Array(FusionKey("net", "data", SIZE), tuple(members)),))
    control = control or JobControl(prompt=True)
    trainer = Trainer(job, worker_state, SignatureBuilder(task, sets), control, WorkerContext(directory, b""))
    return [report for event in trainer.run() if isinstance(event, Reported) for report in event.reports]


def search(task: Task, space: Mapping[str, Any], directory: Path, **arguments: Any) -> shoal.Study:
    """Run `shoal.tune` in this process, by the validation loss unless another metric is named."""
    usual: dict[str, Any] = {"metric": "valid_loss", "mode": "min", "backend": "inline", "show_progress": False}
    return shoal.tune(task, space, directory=directory, **{**usual, **arguments})


def save(runtime: TrialRuntime, directory: Path) -> None:
    """Save a trial, and wait for its checkpoint."""
    writer = CheckpointWriter(directory)
    runtime.save(writer)
    writer.flush()
    writer.close()


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint in this thread."""
    return write(directory, snapshot(checkpoint))
