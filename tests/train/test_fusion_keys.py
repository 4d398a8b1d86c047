"""Fusion keys depend on the optimizers of trials where their updates cannot be fused."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import TensorDataset

from shoal.core.array import Array, FusionKey, Member
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Trial
from shoal.task import Task
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")


class Own(SGD):
    """Optimizer class of the user."""


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: SGD(params, 0.1),
    "momentum": lambda params: SGD(params, 0.1, momentum=0.9),
    "adam": lambda params: Adam(params, 0.01),
    "adamw": lambda params: AdamW(params, 0.01, amsgrad=True),
    "adagrad": lambda params: Adagrad(params, 0.01),
    "adadelta": lambda params: Adadelta(params),
    "rmsprop": lambda params: RMSprop(params, 0.01),
    "own": lambda params: Own(params, 0.1),
}


def hooked(params: Any) -> Optimizer:
    optimizer = SGD(params, 0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


OPTIMIZERS["hooked"] = hooked


class Line(Task):
    def data(self, config: Any) -> Any:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x), TensorDataset(x)

    def model(self, config: Any) -> nn.Module:
        return nn.Linear(3, 1)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return OPTIMIZERS[config["optimizer"]](model.parameters())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()


class WithStep(Line):
    """Overrides `step`, which may use an optimizer in any way."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> torch.Tensor:
        return super().step(model, batch, optimizer)


def trial(number: int, optimizer: str) -> Trial:
    return Trial(number, {"optimizer": optimizer}, seed=number, data_seed=0)


def key(task: Task, optimizer: str) -> FusionKey:
    return SignatureBuilder(task, DataSets(task, CPU)).key(trial(0, optimizer))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("sgd", "momentum", True),
        ("sgd", "adam", True),
        ("adamw", "adagrad", True),
        ("sgd", "rmsprop", False),
        ("rmsprop", "adadelta", False),
        ("sgd", "own", False),
        ("sgd", "hooked", False),
    ],
)
def test_optimizers_that_kernels_do_not_update_are_apart_from_all_others(one: str, other: str, same: bool) -> None:
    assert (key(Line(), one) == key(Line(), other)) is same


def test_where_the_step_is_the_users_optimizers_of_other_classes_are_apart() -> None:
    assert key(WithStep(), "sgd") == key(WithStep(), "momentum")
    assert key(WithStep(), "sgd") != key(WithStep(), "adam")


def test_those_of_one_class_are_side_by_side_in_an_array(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Line()
    sets = DataSets(task, CPU)
    signature_builder, worker_state = SignatureBuilder(task, sets), WorkerState(task, sets, TrialCache(), CPU, tmp_path)
    names = ["sgd", "adam", "sgd", "adagrad", "adam", "momentum"]
    members = tuple(Member(trial(number, name), 0, 2) for number, name in enumerate(names))
    (one,) = {signature_builder.key(member.trial) for member in members}
    seen: list[list[int]] = []
    stepper_of = ArrayTrainer._stepper_for

    def noting(lane: ArrayTrainer, epoch_steps: int) -> Any:
        stepper = stepper_of(lane, epoch_steps)
        seen.append([runtime.trial.number for runtime in stepper.runtimes])
        return stepper

    monkeypatch.setattr(ArrayTrainer, "_stepper_for", noting)
    job, context = Job("job", (Array(one, members),)), WorkerContext(tmp_path, b"")
    list(Trainer(job, worker_state, signature_builder, JobControl(prompt=True), context).run())
    assert seen
    assert all(order == [3, 1, 4, 0, 2, 5] for order in seen)


class Reads(Line):
    """Reads a name of the config in `data`, `model`, `scheduler`, `clip_norm` and the optimizer each."""

    def data(self, config: Any) -> Any:
        return super().data(config) if config["of_data"] else None

    def model(self, config: Any) -> nn.Module:
        return nn.Linear(3, 1, bias=config["of_model"])

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return SGD(model.parameters(), 0.1, momentum=config["momentum"] if config.get("heavy", True) else 0.0)

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, config["of_scheduler"])

    def clip_norm(self, config: Any) -> float:
        return config["of_clip_norm"]


class ReadsWhileTraining(Reads):
    def evaluate(self, outputs: list[Any], config: Any) -> Any:
        return {"above": config["thresh" + outputs[0]]}


READ = {"of_data": 1, "of_model": True, "momentum": 0.5, "of_scheduler": 3, "of_clip_norm": 1.0, "batch_size": 4}


def note_of(task: Task, *configs: dict[str, Any]) -> str:
    trials = [Trial(number, config, seed=number, data_seed=0) for number, config in enumerate(configs)]
    keys, raised, note = SignatureBuilder(task, DataSets(task, CPU)).find_keys(trials)
    assert len(keys) == len(configs)
    assert not raised
    return note


def test_a_name_that_no_method_reads_is_noted() -> None:
    assert note_of(Reads(), READ) == ""
    note = note_of(Reads(), READ | {"widht": 1}, READ | {"widht": 2})
    assert note == "no method of the task reads 'widht' of the config; its values change nothing: check the spelling"


def test_a_name_that_some_trials_read_is_not_noted() -> None:
    light = READ | {"heavy": False}
    assert "'momentum'" in note_of(Reads(), light)
    assert note_of(Reads(), light, READ | {"heavy": True}) == ""


NAMES = ("alpha", "beta")


def penalty(model: nn.Module, config: Any) -> Any:
    return config.get("alpha") * model.weight.square().sum()


def named(model: nn.Module, alpha: float, **others: Any) -> Any:
    return alpha * model.weight.square().sum()


def undecorated(function: Any) -> Any:
    def inner(self: Any, *given: Any) -> Any:
        return function(self, *given)

    return inner


class OwnStep(Reads):
    clip_norm = Task.clip_norm


class InStep(OwnStep):
    def step(self, model: Any, batch: Any, optimizer: Any, config: Any) -> Any:
        return self.loss(model, batch) + config["alpha"] * model.weight.square().sum()


class InMethod(OwnStep):
    names = NAMES

    def step(self, model: Any, batch: Any, optimizer: Any, config: Any) -> Any:
        return self.loss(model, batch) + self.penalty(model, config)

    def penalty(self, model: Any, config: Any) -> Any:
        return sum(config[name] for name in self.names)


class InFunction(OwnStep):
    def step(self, model: Any, batch: Any, optimizer: Any, config: Any) -> Any:
        return self.loss(model, batch) + penalty(model, config)


class InConstant(OwnStep):
    def step(self, model: Any, batch: Any, optimizer: Any, config: Any) -> Any:
        return self.loss(model, batch) + sum(config[name] for name in NAMES)


class ByKeyword(OwnStep):
    def step(self, model: Any, batch: Any, optimizer: Any, config: Any) -> Any:
        return self.loss(model, batch) + named(model, **config)


class Inherits(InStep):
    @undecorated
    def step(self, model: Any, batch: Any, optimizer: Any, config: Any) -> Any:
        return super().step(model, batch, optimizer, config)


class InEvaluate(Reads):
    def evaluate(self, outputs: list[Any], config: Any) -> Any:
        match config:
            case {"alpha": threshold}:
                return {"above": threshold}
        return {}


@pytest.mark.parametrize("kind", [InStep, InMethod, InFunction, InConstant, ByKeyword, Inherits, InEvaluate])
def test_a_name_that_a_method_called_while_training_reads_is_not_noted(kind: type[Task]) -> None:
    config = {name: value for name, value in READ.items() if name != "of_clip_norm" or kind is InEvaluate}
    assert note_of(kind(), config | {"alpha": 0.5}) == ""
    assert "'alhpa'" in note_of(kind(), config | {"alhpa": 0.5})


def test_the_note_names_methods_that_may_read_the_config_while_training() -> None:
    note = note_of(ReadsWhileTraining(), READ | {"threshold": 0.5})
    assert "'threshold'" in note
    assert "unless `evaluate` reads it" in note
