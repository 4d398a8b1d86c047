"""Setting attributes of the task for one trial is refused, and each call gets its own copy of the config."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SIZE, Small, X, Y, runtimes, search, trial, work
from torch import Tensor, nn

import shoal
from shoal.core.array import Member
from shoal.core.errors import TaskError
from shoal.task import Task
from shoal.train.data.datasets import DataSets
from shoal.train.fused_stepper import FusedStepper
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.stepper import PlainStepper, Stepper


def writing(method: str, name: str = "warm", deletes: bool = False) -> type[Task]:
    """Return a task one of whose methods sets an attribute."""
    original = getattr(Small, method)

    def writes(self: Any, *args: Any) -> Any:
        if deletes:
            delattr(self, name)
        else:
            setattr(self, name, args)
        return original(self, *args)

    return type("Writes", (Small,), {method: writes, "kept": None})


BUILDING = ("model", "optimizer", "scheduler", "batch_size")
STEPPING = ("step", "loss")


@pytest.mark.parametrize("fused", [1, 3, 0], ids=["array of one", "array of three", "one after another"])
@pytest.mark.parametrize("method", [*BUILDING, *STEPPING, "metrics"])
def test_writing_is_refused_by_name(method: str, fused: int, tmp_path: Path) -> None:
    task = writing(method)()

    def train() -> None:
        if method in BUILDING:
            work(task, tmp_path, [Member(trial(b), 0, 1) for b in range(fused or 1)])
            return
        some = runtimes(task, [trial(b) for b in range(fused or 3)])
        stepper: Stepper = FusedStepper(task, some) if fused else PlainStepper(task, some)
        if method != "metrics":
            stepper.train_step([(X[:SIZE], Y[:SIZE])] * len(some), [0] * len(some))
        stepper.validate([(X, Y)])

    with pytest.raises(TaskError, match=rf"`{method}` sets its attribute 'warm', which all trials share; keep"):
        train()
    assert not hasattr(task, "warm")


def test_deleting_is_refused_too(tmp_path: Path) -> None:
    task = writing("optimizer", "kept", deletes=True)()
    task.kept = 1
    with pytest.raises(TaskError, match="`optimizer` deletes its attribute 'kept'"):
        work(task, tmp_path, [Member(trial(0), 0, 1)])
    assert task.kept == 1


def test_a_schedule_kept_on_the_task_names_its_remedy() -> None:
    class Warm(Small):
        def scheduler(self, optimizer: Any, config: Any) -> Any:
            self.warm = torch.optim.lr_scheduler.LinearLR(optimizer)

    with pytest.raises(TaskError, match='return the scheduler from `scheduler`, with scheduler_interval = "step"'):
        runtimes(Warm(), [trial(0)])


def test_the_remedies_it_names_serve_the_class_of_a_script(tmp_path: Path) -> None:
    """Such a class is pickled by value, as the one here."""
    sets = torch.utils.data.TensorDataset(X, Y)

    class Kept(Small):
        def __init__(self) -> None:
            self.rate = 0.1

        def data(self, config: Any) -> Any:
            self.sets = sets
            return self.sets, self.sets

        def model(self, config: Any) -> nn.Module:
            model = super().model(config)
            model.rate = self.rate  # type: ignore[assignment]
            return model

        def optimizer(self, model: nn.Module, config: Any) -> Any:
            return torch.optim.SGD(model.parameters(), lr=model.rate)  # type: ignore[arg-type]

    with pytest.raises(TaskError, match="set what serves all of them in `__init__` or in `data`; for a schedule"):
        runtimes(writing("model")(), [trial(0)])
    study = search(
        Kept(), {"lr": 0.1}, tmp_path / "study", algorithm=shoal.Grid(epochs=1), backend="local", devices="cpu:1"
    )
    assert [str(row.state) for row in study.trials] == ["complete"]


class Caching(Small):
    """Keeps a value on `self` that is the same for all trials, which is allowed."""

    def __init__(self) -> None:
        self.loaded = 0

    def data(self, config: Any) -> Any:
        self.loaded += 1
        self.sets = super().data(config)
        return self.sets

    @functools.cached_property
    def width(self) -> int:
        return 4

    def model(self, config: Any) -> nn.Module:
        assert self.width == 4
        inner = Caching()  # another task than the one that runs
        assert inner.loaded == 0
        return super().model(config)


def test_data_init_and_cached_properties_may_write(tmp_path: Path) -> None:
    task = Caching()
    assert len(work(task, tmp_path, [Member(trial(b), 0, 1) for b in range(2)])) == 2
    assert task.loaded == 1
    task.loaded = 5  # and so may whoever has it, when nothing is trained


def test_a_plain_loop_may_write() -> None:
    task = writing("model")()
    task.model({"lr": 0.1})
    assert task.warm == ({"lr": 0.1},)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_search_ends_with_the_method_and_the_attribute(fuse: bool, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the task's `optimizer` sets its attribute 'warm'"):
        search(
            writing("optimizer")(),
            {"lr": shoal.loguniform(0.01, 0.1)},
            tmp_path / "study",
            algorithm=shoal.Random(2, epochs=1),
            fuse=fuse,
        )


class Changing(Small):
    """Changes the config in every method."""

    def spoil(self, config: Any) -> None:
        assert config["net"] == {"width": 4, "rate": 0.1}, config
        config["lr"] = None
        config["net"]["width"] = 0
        del config["net"]["rate"]

    def data(self, config: Any) -> Any:
        self.spoil(config)
        return super().data(config)

    def model(self, config: Any) -> nn.Module:
        self.spoil(config)
        return super().model(config)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        found = super().optimizer(model, config)
        self.spoil(config)
        return found

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        self.spoil(config)

    def batch_size(self, config: Any) -> int:
        self.spoil(config)
        return SIZE

    def step(self, model: nn.Module, batch: Any, optimizer: Any, config: Any) -> Tensor:
        self.spoil(config)
        return super().step(model, batch, optimizer, config)


def test_each_call_has_a_config_of_its_own(tmp_path: Path) -> None:
    space = {"lr": shoal.loguniform(0.01, 0.1), "net": {"width": 4, "rate": 0.1}}
    study = search(Changing(), space, tmp_path / "study", algorithm=shoal.Random(3, epochs=2))
    assert [row.epoch for row in study.trials] == [2, 2, 2]
    assert all(row.trial.config["net"] == {"width": 4, "rate": 0.1} for row in study.trials)
    assert all(row.trial.config["lr"] > 0 for row in study.trials)
    study.best_model()


class Owning(Small):
    """Has an optimizer that trains the given parameters."""

    foreign = nn.Linear(2, 2)

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    def optimizer(self, model: Any, config: Any) -> Any:
        kinds = {"all": model[2], "bias left out": [model[2].weight], "foreign": [*model[2].parameters(), *self.own()]}
        given = kinds[config["kind"]]
        return torch.optim.SGD(given.parameters() if isinstance(given, nn.Module) else given, lr=config["lr"])

    def own(self) -> Any:
        return self.foreign.parameters()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("all", ""),
        ("bias left out", "leaves out parameters of the model ('2.bias'), which keep their initial values"),
        ("foreign", "trains parameters that are not the model's (one of shape (2, 2), one of shape (2,)), which no"),
    ],
)
def test_an_optimizer_of_other_parameters_is_noted(kind: str, message: str) -> None:
    task = Owning()
    trials = [replace(trial(b), config={"lr": 0.1, "kind": kind}) for b in range(3)]  # names that it reads
    _, _, note = SignatureBuilder(task, DataSets(task, CPU)).find_keys(trials)
    assert bool(message) == bool(note)
    assert message in note
