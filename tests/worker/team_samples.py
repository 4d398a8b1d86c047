"""Tasks whose arrays teams train, and runs of a leader in this process with helpers in processes of their own."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.backends.local import Local
from shoal.core.array import Array, Member
from shoal.core.device import Device
from shoal.core.event import Ended, Event
from shoal.core.job import Job, JobUpdate, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.data.datasets import DataSets
from shoal.task import Task
from shoal.worker.array_trainer import ArrayTrainer
from shoal.worker.checkpoint import load_newest
from shoal.worker.control import JobControl
from shoal.worker.signature_builder import SignatureBuilder
from shoal.worker.stepper import Stepper
from shoal.worker.team.leader import TeamLeader
from shoal.worker.train import Trainer
from shoal.worker.worker_state import TrialCache, WorkerState

SAMPLES = 26
LEADER = "leader"


class Perceptron(Task):
    """Multilayer perceptron with dropout and a batch size that does not divide the samples."""

    def data(self, config: Any) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES + 6, *self.shape, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (SAMPLES + 6,), generator=generator)
        return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])

    shape: tuple[int, ...] = (5,)

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

    def clip_norm(self, config: Any) -> Any:
        return config["lr"] * 20

    def batch_size(self, config: Any) -> int:
        return 7

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


class Convolutional(Perceptron):
    """Convolutional network with batch norm, dropout of channels, label weights and gradient accumulation."""

    shape = (2, 6, 6)

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.BatchNorm2d(4, momentum=None),
            nn.Flatten(),
            nn.Linear(16, 3),
            nn.BatchNorm1d(3, affine=False),
        ).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        """Not Adam, which would amplify the rounding errors of gradients that are zero before a batch norm."""
        return torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)

    def accumulate(self, config: Any) -> int:
        return 2

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        return F.cross_entropy(model(x), y, weight, ignore_index=2) + 0.1 * model(x).square().mean()


TASKS: dict[str, Callable[[], Task]] = {"mlp": Perceptron, "cnn": Convolutional}


def member(number: int, epochs: int) -> Member:
    return Member(Trial(number, {"lr": 0.01 * (number + 1)}, seed=100 + number, data_seed=7), 0, epochs)


Action = Callable[["Leader"], None]


class Leader:
    """A training job in this process, and helpers in processes of a local back end.

    Args:
        task: Task of the study.
        directory: Directory of the study.
    """

    def __init__(self, task: Task, directory: Path) -> None:
        sets = DataSets(task, torch.device("cpu"))
        self._builder = SignatureBuilder(task, sets)
        self._state = WorkerState(task, sets, TrialCache(), torch.device("cpu"), directory)
        self._context = WorkerContext(directory, cloudpickle.dumps(task))
        self._directory = directory
        self._wanted: tuple[str, ...] = ()
        self.control = JobControl(prompt=True)
        self.backend: Local | None = None
        self.names: list[str] = []
        self.sizes: list[int] = []
        """Number of processes that computed the gradients, for each step."""

    def array(self, *members: Member) -> Array:
        return Array(self._builder.key(members[0].trial), members)

    def start(self, *helpers: str) -> None:
        """Start jobs that assist this one."""
        self.backend = self.backend or Local(self._context)
        for name in helpers:
            self.names.append(name)
            job = Job(name, (self.array(member(0, 1)),), Purpose.ASSIST, assists=LEADER)
            self.backend.start(job, Device(f"cpu:{len(self.names)}", "cpu", 2**30))

    def want(self, *helpers: str) -> None:
        """Ask for a team of these helpers; the next step but one waits until they are ready."""
        self._wanted = helpers
        self.control.change(JobUpdate(team=frozenset(helpers)))

    def train(self, members: Iterable[Member], steps: Mapping[int, Action] | None = None) -> list[Event]:
        """Train members; return the events.

        Args:
            members: Members of one array.
            steps: Number of steps -> what happens after so many steps.
        """
        trainer = Trainer(Job(LEADER, (self.array(*members),)), self._state, self._builder, self.control, 1e9)
        take_step = ArrayTrainer._take_step

        def observed(lane: ArrayTrainer, stepper: Stepper, *args: Any) -> Tensor:
            if lane.team is not None and lane.team._stepper is stepper:
                self._await_helpers(lane.team)
            losses = take_step(lane, stepper, *args)
            self.sizes.append(1 if lane.team is None else lane.team.size)
            if action := (steps or {}).get(len(self.sizes)):
                action(self)
            return losses

        with patch.object(ArrayTrainer, "_take_step", observed):
            try:
                return list(trainer.run())
            finally:
                self.outcomes = self.close()

    def _await_helpers(self, team: TeamLeader) -> None:
        """Wait until all wanted helpers are in the team, or ready."""
        deadline = time.monotonic() + 30
        if team._key in team._refused:
            return
        present = set() if team._channel is None else set(team._channel.members)
        while set(self._wanted) - present - set(team._side.ready(self._wanted)):
            assert time.monotonic() < deadline, (self._wanted, present)
            if team._side.refusal():
                break
            time.sleep(0.002)
        team._looked = 0.0

    def close(self) -> dict[str, Ended]:
        """Return how the helpers have ended, after they have."""
        if self.backend is None:
            return {}
        ended: dict[str, Ended] = {}
        deadline = time.monotonic() + 20
        while set(self.names) - ended.keys() and time.monotonic() < deadline:
            for event in self.backend.poll(0.1):
                if isinstance(event, Ended):
                    ended[event.job] = event
        self.backend.close()
        return ended

    def weights(self, number: int) -> dict[str, Tensor]:
        """Final weights and buffers of a trial."""
        checkpoint = load_newest(self._directory, number)
        assert checkpoint is not None
        return checkpoint.model
