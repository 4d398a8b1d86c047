"""What a trial carries from step to step outside of state dicts is in its checkpoint, and a resume restores it."""

import gc
import random
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_samples import StopsAfter, save
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from shoal.arguments import pickled_task
from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Noted, Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Origin, Trial
from shoal.task import Task
from shoal.train.checkpoint import load_newest
from shoal.train.checkpoint_paths import checkpoint_directory, checkpoint_files, state_files
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.trained_model import trained_model
from shoal.train.trial_runtime import TrialRuntime, build
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
EPOCHS, STEPS = 3, 4


@dataclass
class Meter:
    """Mean of values, with a log of them."""

    count: int = 0
    total: float = 0.0
    log: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Slim:
    """A counter without a dict of attributes."""

    count: int = 0


class Locked:
    """A counter that threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


class CountingSGD(torch.optim.SGD):
    """Takes smaller steps with each."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.taken = 0

    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            for each in group["params"]:
                each.data.sub_(each.grad, alpha=group["lr"] / self.taken)


class Net(nn.Module):
    def __init__(self, prepare: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 1)
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)))


class Habit(Task):
    """Trains with a factor that depends on state which `use` keeps on the model, once a step."""

    def __init__(
        self, prepare: Callable[[Any], None], use: Callable[[Any, Tensor], Any], optimizer: Any = None
    ) -> None:
        self.prepare, self.use = prepare, use
        self.make = optimizer or torch.optim.Adam

    def data(self, config: Any) -> tuple[Any, Any]:
        x = torch.randn(4 * STEPS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return (both := TensorDataset(x, x.sum(1, keepdim=True))), both

    def batch_size(self, config: Any) -> int:
        return 4

    def model(self, config: Any) -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return Net(self.prepare)
        finally:
            torch.set_default_dtype(torch.float32)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return self.make(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        (loss * self.use(model, batch[0])).backward()
        optimizer.step()
        return loss.detach()


def member(number: int = 0, start: int = 0) -> Member:
    return Member(Trial(number, {"lr": 0.05 / (number + 1)}, seed=number, data_seed=5), start, EPOCHS)


def events_of(task: Task, directory: Path, control: JobControl, *members: Member) -> list[Any]:
    sets = DataSets(task, CPU)
    directory.mkdir(parents=True, exist_ok=True)
    worker_state = WorkerState(task, sets, TrialCache(), CPU, directory)
    job = Job("job", (Array(FusionKey("one", "data", 4), members or (member(),)),))
    context = WorkerContext(directory, b"", checkpoint_seconds=60.0)
    return list(Trainer(job, worker_state, SignatureBuilder(task, sets), control, context).run())


def metrics(events: list[Any]) -> dict[tuple[int, int], float]:
    reports = [report for event in events if isinstance(event, Reported) for report in event.reports]
    return {(report.trial, report.epoch): report.metrics["valid_loss"] for report in reports}


def whole(task: Task, directory: Path, *members: Member) -> dict[tuple[int, int], float]:
    return metrics(events_of(task, directory / "whole", JobControl(prompt=True), *members))


def parts(task: Task, directory: Path, looks: int, *members: Member) -> dict[tuple[int, int], float]:
    """Metrics of trials that are stopped after some steps, and continue in what may be another process."""
    control = StopsAfter(looks - 1)
    events = events_of(task, directory / "parts", control, *members)
    assert control.stop_noticed
    gc.collect()
    return metrics(events + events_of(task, directory / "parts", JobControl(prompt=True), *members))


def count(model: Any, x: Tensor) -> float:
    model.count += 1
    return 1 + 0.1 * model.count


def hidden(model: Any, x: Tensor) -> Tensor:
    """A recurrent network over batches, whose state is detached when it is used next."""
    state = None if model.hidden is None else tuple(part.detach() for part in model.hidden)
    out, model.hidden = model.cell(x[:, None], state)
    return 1 + out.square().mean()


def hidden_in_place(model: Any, x: Tensor) -> Tensor:
    for part in model.hidden:
        part.mul_(0.5).add_(x.detach().sum())
    return 1 + 0.1 * model.hidden[0].sum().tanh()


def cell(model: Any) -> None:
    model.hidden, model.cell = None, nn.LSTM(4, 3, batch_first=True)


def means(model: Any, x: Tensor) -> float:
    model.means["x"] = model.means.get("x", 0.0) + x.mean().item()
    return 1 + 0.1 * model.means["x"] ** 2


def queue(model: Any, x: Tensor) -> Tensor:
    model.queue.append(x.detach().mean())
    return 1 + torch.stack(tuple(model.queue)).square().sum()


def tally(model: Any, x: Tensor) -> float:
    model.tally.update(["odd" if sum(model.tally.values()) % 2 else "even"])
    return 1 + 0.1 * model.tally["odd"]


def seen(model: Any, x: Tensor) -> float:
    model.seen.add(round(x[0, 0].item(), 6))
    return 1 + 0.1 * len(model.seen)


def meter(model: Any, x: Tensor) -> float:
    model.meter.count += 1
    model.meter.total += x.mean().item()
    model.meter.log.append(model.meter.total)
    return 1 + 0.1 * len(model.meter.log) + model.meter.total**2 / model.meter.count


def new_meter(model: Any, x: Tensor) -> float:
    model.meter = Meter(model.meter.count + 1 if model.meter else 1)
    return 1 + 0.1 * model.meter.count


def slim(model: Any, x: Tensor) -> float:
    model.slim.count += 1
    return 1 + 0.1 * model.slim.count


def locked(model: Any, x: Tensor) -> float:
    with model.locked.lock:
        model.locked.count += 1
    return 1 + 0.1 * model.locked.count


def hooked(model: Any) -> None:
    """Keep the log of a hook, which closes over it, on the model."""
    model.log = log = []
    model.inner.register_forward_hook(lambda module, args, out: log.append(out.detach().mean()))


def parts_of_model(model: Any, x: Tensor) -> Tensor:
    """Penalise the parameter that an attribute refers to, another one at each step."""
    chosen = model.out.weight if model.kept and model.kept["chosen"][0] is model.inner.weight else model.inner.weight
    model.kept = {"chosen": [chosen], "view": model.inner.weight.data[0]}
    return 1 + chosen.square().sum() + model.kept["view"].sum().square()


def own_optimizer(model: Any) -> None:
    model.extra = nn.Linear(4, 1)
    model.opt = torch.optim.Adam(model.extra.parameters(), lr=0.1)
    model.plan = StepLR(model.opt, 2, 0.7)


def train_extra(model: Any, x: Tensor) -> Tensor:
    model.opt.zero_grad()
    (model.extra(x.detach()).mean() - 3).square().backward()
    model.opt.step()
    model.plan.step()
    return 1 + model.extra(x).mean().square().detach()


def loose(model: Any) -> None:
    """A parameter that no module registers, with an optimizer of its own."""
    model.loose = [nn.Parameter(torch.ones(4))]
    model.opt = torch.optim.SGD(model.loose, lr=0.1, momentum=0.9)


def train_loose(model: Any, x: Tensor) -> Tensor:
    model.opt.zero_grad()
    (x.detach() @ model.loose[0]).square().mean().backward()
    model.opt.step()
    return 1 + model.loose[0].detach().square().sum()


def unfreeze(model: Any, x: Tensor) -> float:
    """Freeze a layer from the third step on."""
    model.count += 1
    model.inner.requires_grad_(model.count < 3)
    return 1.0


def passing(model: Any) -> None:
    model.register_buffer("passing", torch.zeros(4), persistent=False)


def add_passing(model: Any, x: Tensor) -> Tensor:
    model.passing = 0.9 * model.passing + x.detach().mean(0)
    return 1 + model.passing.square().sum()


def kept(model: Any, x: Tensor) -> float:
    model.ordered.move_to_end(next(iter(model.ordered)))
    return 1 + 0.1 * next(iter(model.ordered.values()))


def visits(model: Any, x: Tensor) -> float:
    """Changes values of a large dict, and not its size."""
    place = sum(model.visits.values())
    model.visits[place] += 1
    return 1 + 0.1 * place


def episodes(model: Any) -> None:
    model.episodes = [[number] for number in range(1500)]
    model.current = model.episodes[7]


def go_on(model: Any, x: Tensor) -> float:
    """Changes an item of a large list by another name."""
    model.current.append(1)
    return 1 + 0.1 * len(model.episodes[7])


def memories(model: Any, x: Tensor) -> Tensor:
    model.memories[3].add_(x.detach().mean())
    return 1 + model.memories[3].square().sum()


HABITS: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Any]]] = {
    "a counter": (lambda m: setattr(m, "count", 0), count),
    "a counter of a submodule": (lambda m: setattr(m.inner, "count", 0), lambda m, x: count(m.inner, x)),
    "the hidden state of an LSTM": (cell, hidden),
    "a hidden state changed in place": (
        lambda m: setattr(m, "hidden", (torch.zeros(2), torch.zeros(3))),
        hidden_in_place,
    ),
    "a dict": (lambda m: setattr(m, "means", {}), means),
    "a deque of tensors": (lambda m: setattr(m, "queue", deque(maxlen=3)), queue),
    "a Counter": (lambda m: setattr(m, "tally", Counter()), tally),
    "an OrderedDict": (lambda m: setattr(m, "ordered", OrderedDict({"a": 1, "b": 2, "c": 5, "d": 3, "e": 7})), kept),
    "a large dict": (lambda m: setattr(m, "visits", dict.fromkeys(range(1500), 0)), visits),
    "an item of a large list": (episodes, go_on),
    "a large list of tensors": (lambda m: setattr(m, "memories", [torch.zeros(2) for _ in range(1500)]), memories),
    "a set": (lambda m: setattr(m, "seen", set()), seen),
    "a dataclass": (lambda m: setattr(m, "meter", Meter()), meter),
    "a dataclass made anew": (lambda m: setattr(m, "meter", None), new_meter),
    "an object with slots": (lambda m: setattr(m, "slim", Slim()), slim),
    "an object with a lock": (lambda m: setattr(m, "locked", Locked()), locked),
    "a log of a hook": (hooked, lambda m, x: 1 + torch.stack(m.log).square().sum()),
    "Python's generator": (lambda m: setattr(m, "rng", random.Random(3)), lambda m, x: m.rng.random()),
    "NumPy's generator": (lambda m: setattr(m, "rng", np.random.default_rng(3)), lambda m, x: m.rng.random()),
    "torch's generator": (
        lambda m: setattr(m, "rng", torch.Generator().manual_seed(3)),
        lambda m, x: torch.rand((), generator=m.rng),
    ),
    "an attribute that appears": (
        lambda m: None,
        lambda m, x: count(setattr(m, "count", getattr(m, "count", 0)) or m, x),
    ),
    "references to parameters": (lambda m: setattr(m, "kept", None), parts_of_model),
    "an optimizer on the model": (own_optimizer, train_extra),
    "an optimizer of a loose parameter": (loose, train_loose),
    "frozen parameters": (lambda m: setattr(m, "count", 0), unfreeze),
    "a buffer that is not saved": (passing, add_passing),
}


@pytest.mark.in_turns
@pytest.mark.parametrize("looks", [4, 7])
@pytest.mark.parametrize("habit", HABITS)
def test_a_trial_that_is_stopped_goes_on_with_what_it_carries(habit: str, looks: int, tmp_path: Path) -> None:
    task = Habit(*HABITS[habit])
    wanted = whole(task, tmp_path)
    assert parts(task, tmp_path, looks) == wanted
    assert whole(Habit(HABITS[habit][0], lambda model, x: 1.0), tmp_path / "without") != wanted, "it has no effect"
    for path in checkpoint_files(tmp_path / "parts", 0):
        content = torch.load(path, weights_only=True)
        assert content["carried"] is not None
    for path in state_files(tmp_path / "parts", 0):
        assert torch.load(path, weights_only=True)["lost"] == ""


def test_optimizers_keep_their_own_attributes(tmp_path: Path) -> None:
    task = Habit(lambda model: None, lambda model, x: 1.0, CountingSGD)
    assert parts(task, tmp_path, 5) == whole(task, tmp_path)


def test_an_array_goes_on_with_the_counters_of_its_members(tmp_path: Path) -> None:
    task = Habit(*HABITS["a counter"])
    members = [member(number) for number in range(3)]
    alone = {
        key: value for each in members for key, value in whole(task, tmp_path / str(each.trial.number), each).items()
    }
    found = parts(task, tmp_path, 6, *members)
    assert found.keys() == alone.keys()
    assert found == pytest.approx(alone, rel=1e-9)


class Ordinary(Habit):
    def __init__(self) -> None:
        super().__init__(lambda model: setattr(model, "config", {"width": 4, "act": torch.tanh}), lambda model, x: 1.0)

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.norm, model.rnn = nn.BatchNorm1d(1), nn.LSTM(1, 1)
        model.register_forward_hook(lambda module, args, out: module.rnn(module.norm(out))[0])
        return model.double()

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return StepLR(optimizer, 1, 0.9)

    step = Task.step


@pytest.mark.parametrize("count", [1, 3])
def test_an_ordinary_model_adds_nothing_to_its_checkpoint(count: int, tmp_path: Path) -> None:
    events_of(Ordinary(), tmp_path, JobControl(prompt=True), *(member(number) for number in range(count)))
    for number in range(count):
        found = load_newest(tmp_path, number)
        assert found is not None
        assert (found.carried, found.lost) == (b"", "")


def counts_with_a_lambda(model: Any, x: Tensor) -> float:
    model.count += 1
    model.factor = lambda count=model.count: 1 + 0.1 * count
    return model.factor()


def test_what_cannot_be_pickled_is_named_once_and_the_trial_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = Habit(lambda model: setattr(model, "count", 0), counts_with_a_lambda)
    wanted = whole(task, tmp_path)
    caplog.clear()
    control = StopsAfter(6)
    events = events_of(task, tmp_path / "parts", control)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith(
        "trial 0 cannot be resumed, and begins anew in another process: its checkpoint lacks `model."
    )
    assert "`model.factor`, a function (" in said[0]
    assert "make it in the task's `model`" in said[0]
    assert [event.note for event in events if isinstance(event, Noted)] == said
    caplog.clear()
    again = events_of(task, tmp_path / "parts", JobControl(prompt=True))
    assert caplog.records[0].getMessage() == "trial 0 begins anew: its checkpoint lacks model.factor"
    assert metrics(again) == wanted


def test_a_generator_function_that_goes_on_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = Habit(
        lambda model: setattr(model, "factors", (x for x in range(1, 99))), lambda model, x: next(model.factors)
    )
    wanted = whole(task, tmp_path)
    assert "`model.factors`, a generator, whose position cannot be read" in caplog.text
    assert parts(task, tmp_path, 5) == wanted


def test_functions_and_locks_that_stay_as_they_were_made_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(model: Any) -> None:
        model.count, model.scale, model.lock = 0, lambda count: 1 + 0.1 * count, threading.Lock()

    def use(model: Any, x: Tensor) -> float:
        model.count += 1
        model.used = [model.scale, model.lock]
        return model.used[0](model.count)

    task = Habit(prepare, use)
    assert parts(task, tmp_path, 5) == whole(task, tmp_path)
    assert caplog.records == []


def runtime(task: Task, number: int = 0, origin: Origin | None = None) -> TrialRuntime:
    one = member(number)
    return build(task, replace(one, trial=replace(one.trial, origin=origin)), CPU)


def test_what_a_build_has_made_is_not_stored() -> None:
    one, other = (runtime(Habit(*HABITS["a dataclass"])) for _ in range(2))
    assert one.carried is not None
    assert other.carried is not None
    assert one.carried.dump() == (b"", [])
    meter(one.model, torch.ones(2, 4))
    content, _ = one.carried.dump()
    other.carried.restore(content)
    assert other.model.meter == Meter(1, 1.0, [1.0])


def test_what_cannot_be_pickled_in_a_large_list_is_named_once_the_list_changes() -> None:
    def prepare(model: Any) -> None:
        model.rules = [lambda x: x for _ in range(1500)]

    one = runtime(Habit(prepare, lambda model, x: 1.0))
    assert one.carried is not None
    assert one.carried.dump() == (b"", [])
    one.model.rules[5] = lambda x: 2 * x
    content, lost = one.carried.dump()
    assert content == b""
    assert [each.path for each in lost] == ["model.rules"]


def test_a_clone_takes_over_the_state_of_the_model_and_keeps_its_own_learning_rate(tmp_path: Path) -> None:
    def prepare(model: Any) -> None:
        model.count = 0
        model.opt = torch.optim.SGD(model.out.parameters(), lr=rates.pop())

    rates = [0.7, 0.3]
    task = Habit(prepare, count)
    first = runtime(task)
    first.model.count = 5
    first.model.opt.param_groups[0]["lr"] = 0.1
    first.epoch = 1
    save(first, tmp_path)
    target = checkpoint_directory(tmp_path, 1)
    target.mkdir()
    for path in (*checkpoint_files(tmp_path, 0), *state_files(tmp_path, 0)):
        (target / path.name).write_bytes(path.read_bytes())
    clone = runtime(task, 1, Origin(0, 1))
    clone.restore(tmp_path, STEPS)
    assert clone.model.count == 5
    assert clone.model.opt.param_groups[0]["lr"] == 0.7


def test_a_trained_model_has_what_it_carries(tmp_path: Path) -> None:
    task = Habit(*HABITS["a dataclass"])
    events_of(task, tmp_path, JobControl(prompt=True))
    model: Any = trained_model(pickled_task(task), member().trial, tmp_path)[0]
    assert model.meter.count == EPOCHS * STEPS
    assert len(model.meter.log) == EPOCHS * STEPS
    assert not model.training
