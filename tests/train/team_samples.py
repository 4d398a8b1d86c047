"""Tasks whose arrays teams train, and runs of a leader in this process with helpers in processes of their own."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from shoal.core.array import Array, Member
from shoal.core.device import Device
from shoal.core.event import Ended, Event
from shoal.core.job import Job, JobUpdate, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.run.local import Local
from shoal.task import Task
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.fused_stepper import FusedStepper
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.stepper import Stepper
from shoal.train.team import leader
from shoal.train.team.leader import TeamLeader
from shoal.train.worker_state import TrialCache, WorkerState

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


class Recurrent(Perceptron):
    """Two-layer LSTM with dropout between its layers; a sample is a sequence, and T is the first axis in the model."""

    shape = (7, 5)

    def model(self, config: Any) -> nn.Module:
        return nn.ModuleDict({"lstm": nn.LSTM(5, 6, 2, dropout=0.3), "head": nn.Linear(6, 3)}).double()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out, _ = model["lstm"](x.transpose(0, 1))  # type: ignore[index]
        return F.cross_entropy(model["head"](out[-1]), y)  # type: ignore[index]


class Adapted(Perceptron):
    """Low-rank adapters over a frozen base that all trials share."""

    def model(self, config: Any) -> nn.Module:
        base = nn.Linear(5, 8)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            base.weight.copy_(torch.randn(8, 5))
            base.bias.zero_()
        base.requires_grad_(False)
        return nn.ModuleDict(
            {"base": base, "down": nn.Linear(5, 2, bias=False), "up": nn.Linear(2, 8), "head": nn.Linear(8, 3)}
        ).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam([each for each in model.parameters() if each.requires_grad], config["lr"])

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        hidden = F.dropout(model["base"](x) + model["up"](model["down"](x)), 0.2, model.training)
        return F.cross_entropy(model["head"](hidden.tanh()), y)


class Bert(Perceptron):
    """Tiny BERT of transformers, with dropout in its attention, and labels of which some are ignored."""

    def data(self, config: Any) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 30, (SAMPLES + 6, 9), generator=generator)
        mask = torch.arange(9) < torch.randint(4, 10, (SAMPLES + 6, 1), generator=generator)
        labels = ids.where(mask & (torch.rand(ids.shape, generator=generator) < 0.5), -100)
        labels[:, 0] = ids[:, 0]
        sets = TensorDataset(ids, mask.long(), labels)
        return Subset(sets, range(SAMPLES)), Subset(sets, range(SAMPLES, SAMPLES + 6))

    def model(self, config: Any) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        return BertForMaskedLM(BertConfig(vocab_size=30, max_position_embeddings=16, **sizes)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        """Not Adam, which would amplify the rounding errors of the gradients of key biases, which are zero."""
        return torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)

    def loss(self, model: Any, batch: Any) -> Tensor:
        ids, mask, labels = batch
        loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        return loss


class InBatch(Perceptron):
    """Has a loss with a mean over the features of the batch, which is not a mean over samples."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        return F.cross_entropy(out, y) + (out - out.mean(0)).square().mean()


class Noisy(Perceptron):
    """Adds noise from a function without a mask."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        return F.cross_entropy(out + 0.1 * torch.randn_like(out), y)


class OwnStep(Perceptron):
    """Overrides `step`."""

    def clip_norm(self, config: Any) -> None:
        return None

    def step(self, model: nn.Module, batch: Any, optimizer: Any, *config: Any, **_: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss


class OtherBase(Adapted):
    """Has another frozen base in each process."""

    def model(self, config: Any) -> nn.Module:
        model: Any = super().model(config)
        with torch.no_grad():
            model["base"].bias.fill_(os.getpid())
        return model


class HalfPrecision(Convolutional):
    """Trains under autocast."""

    def precision(self, config: Any) -> str:
        return "bf16-mixed"

    def data(self, config: Any) -> tuple[Any, Any]:
        return tuple(TensorDataset(x.tensors[0].float(), x.tensors[1]) for x in super().data(config))

    def model(self, config: Any) -> nn.Module:
        return super().model(config).float()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


class Flagged(Perceptron):
    """Has a buffer of bool, which no gradient depends on."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("flags", torch.tensor([True, False]))
        return model


class HeadOnly(Perceptron):
    """Updates the last layer only; the others have gradients as well."""

    def clip_norm(self, config: Any) -> None:
        return None

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.Adam(model[-1].parameters(), config["lr"])


class Single(Perceptron):
    """Trains with batches of one sample."""

    def batch_size(self, config: Any) -> int:
        return 1


class Counting(Perceptron):
    """Counts its calls in an attribute, which the loss depends on."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.calls = 0  # type: ignore[assignment]
        return model

    def loss(self, model: Any, batch: Any) -> Tensor:
        model.calls += 1
        return super().loss(model, batch) * (1.0 + 0.1 * model.calls)


class Masked(Perceptron):
    """Has a batch norm of the elements of a batch that a mask selects, which are more in some rows than in others."""

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)

    def model(self, config: Any) -> nn.Module:
        layers = {"inner": nn.Linear(1, 4), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 3)}
        return nn.ModuleDict(layers).double()

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        kept = x > 0.3
        hidden = model["norm"](model["inner"](x[kept].unsqueeze(1))).tanh()
        return F.cross_entropy(model["head"](hidden), y.unsqueeze(1).expand(x.shape)[kept])


TASKS: dict[str, Callable[[], Task]] = {
    "mlp": Perceptron,
    "cnn": Convolutional,
    "lstm": Recurrent,
    "lora": Adapted,
    "bert": Bert,
    "flagged": Flagged,
    "head": HeadOnly,
    "masked": Masked,
}


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
        directory.mkdir(parents=True, exist_ok=True)
        self._state = WorkerState(task, sets, TrialCache(), torch.device("cpu"), directory)
        self._context = WorkerContext(directory, cloudpickle.dumps(task), checkpoint_seconds=1e9)
        self._directory = directory
        self._wanted: tuple[str, ...] = ()
        self.control = JobControl(prompt=True)
        self.backend: Local | None = None
        self.names: list[str] = []
        self.killed: set[str] = set()
        self.outcomes: dict[str, Ended] = {}
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

    def signal(self, helper: str, number: int) -> None:
        """Send a signal to the process of a helper, which will not be waited for."""
        assert self.backend is not None
        (worker,) = [worker for worker in self.backend._workers.values() if worker.job == helper]
        while not worker.pid:
            self._poll()
        self.killed.add(helper)
        os.kill(worker.pid, number)

    def train(self, members: Iterable[Member], steps: Mapping[int, Action] | None = None) -> list[Event]:
        """Train members; return the events.

        Args:
            members: Members of one array.
            steps: Number of steps -> what happens after so many steps.
        """
        job = Job(LEADER, (self.array(*members),))
        trainer = Trainer(job, self._state, self._builder, self.control, self._context)
        take_step = ArrayTrainer._take_step

        def observed(lane: ArrayTrainer, stepper: Stepper, *args: Any) -> Tensor:
            if lane.team is not None and lane.team._stepper is stepper and lane.key not in lane.team._refused:
                self._await_helpers(lane.team)
            losses = take_step(lane, stepper, *args)
            self.sizes.append(1 if lane.team is None else lane.team.size)
            if action := (steps or {}).get(len(self.sizes)):
                action(self)
            return losses

        with (
            patch.object(ArrayTrainer, "_take_step", observed),
            patch.object(FusedStepper, "settled", True),  # so that the first lone step is measured
            patch.object(leader, "WARM_UP", 0),
            patch.object(leader, "COUNTED", 1),
        ):
            try:
                return list(trainer.run())
            finally:
                self._end()

    def _await_helpers(self, team: TeamLeader) -> None:
        """Wait until all wanted helpers are in the team, or ready."""
        deadline = time.monotonic() + 90
        present = set() if team._channel is None else set(team._channel.members)
        while set(self._wanted) - present - set(team._side.ready(self._wanted)) - self.killed:
            assert time.monotonic() < deadline, (self._wanted, present)
            if team._side.refusal():
                break
            self._poll()
        team._polled = 0.0

    def _poll(self) -> None:
        assert self.backend is not None
        self.outcomes |= {each.job: each for each in self.backend.poll(0.05) if isinstance(each, Ended)}

    def _end(self) -> None:
        """Wait for the ends of all helpers."""
        deadline = time.monotonic() + 20
        while self.backend is not None and set(self.names) - self.outcomes.keys() and time.monotonic() < deadline:
            self._poll()
        if self.backend is not None:
            self.backend.close()

    def weights(self, number: int) -> dict[str, Tensor]:
        """Final weights and buffers of a trial."""
        checkpoint = load_newest(self._directory, number)
        assert checkpoint is not None
        return checkpoint.model
