"""Copies of members in plain PyTorch find what an array computes otherwise, and nothing but that."""

import itertools
import random
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.array import Member
from shoal.core.trial import Trial
from shoal.fuse import frozen
from shoal.fuse.member_changes import AttributeSync
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.rules import linear
from shoal.fuse.step import StepMode, TrainingStep
from shoal.task import Task
from shoal.train import fused_stepper, proof
from shoal.train.comparison import Comparison, counts_samples, first_difference
from shoal.train.data.datasets import DataSets
from shoal.train.fused_stepper import FusedStepper
from shoal.train.metrics import MetricMeans
from shoal.train.outside import OutsideState
from shoal.train.plain_copy import KINK_UNITS, PlainCopy, copied_bytes
from shoal.train.proof import Proof, ProofCost, ProofRecord
from shoal.train.stepper import StepRefusedError
from shoal.train.trial_runtime import TrialRuntime, build

CPU = torch.device("cpu")
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Program(Task):
    """A bias before batch norm has a gradient of zero but for rounding, which Adam makes a full step of."""

    def __init__(self, dtype: torch.dtype = torch.float64, mode: str = "32") -> None:
        self.dtype, self.mode = dtype, mode

    def data(self, config: Any) -> Any:
        raise NotImplementedError

    def model(self, config: Any) -> nn.Module:
        layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 4)
        model = nn.Sequential(*layers).to(self.dtype)
        model.seen = 0  # type: ignore[assignment]
        return model

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def precision(self, config: Any) -> Any:
        return self.mode

    def loss(self, model: Any, batch: Any) -> Tensor:
        model.seen += model.training
        return F.mse_loss(model(batch), batch)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        return {"size": model(batch).abs().mean()}


class Momentum(Program):
    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)


class Kinked(Momentum):
    """For its first sample, a hidden unit is five rounding units below the kink of a ReLU."""

    def model(self, config: Any) -> nn.Module:
        hidden, out = nn.Linear(4, 5).to(self.dtype), nn.Linear(5, 4).to(self.dtype)
        with torch.no_grad():
            hidden.bias[0] -= hidden(X[:1].to(self.dtype))[0, 0] + 5 * torch.finfo(self.dtype).eps
        return nn.Sequential(hidden, nn.ReLU(), out)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=1e-30, momentum=0.9)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch), batch)


class Differs(Program):
    """Reads a number that nobody can seed."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + random.SystemRandom().random())


class Locked(Program):
    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.lock = threading.Lock()  # type: ignore[assignment]
        return model


class LastLayer(Momentum):
    """Trains one layer; gradients of the others add up."""

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.SGD(model[4].parameters(), lr=config["lr"])


class Accumulates(Momentum):
    """Updates with the gradients of three batches."""

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss = self.loss(model, batch)
        loss.backward()
        if model.seen % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


class Counts(Momentum):
    """Counts calls on the model, in validation too, and reports them."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        model.seen += 1
        return F.mse_loss(model(batch), batch)

    def metrics(self, model: Any, batch: Any) -> Mapping[str, Tensor]:
        return {"seen": torch.tensor(float(model.seen))}


class Remembers(Momentum):
    """Counts validation batches in an attribute."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.validated = 0  # type: ignore[assignment]
        return model

    def loss(self, model: Any, batch: Any) -> Tensor:
        if not model.training:
            model.validated += 1
        return super().loss(model, batch)


class Stamped(Momentum):
    """Keeps a number that is another one each time, as that of a clock is."""

    numbers = itertools.count()

    def loss(self, model: Any, batch: Any) -> Tensor:
        model.stamp = next(self.numbers)
        return super().loss(model, batch)


class CountsOnClass(Momentum):
    """Counts the steps of all trials of a process."""

    class Net(nn.Sequential):
        steps = 0

    def model(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(4, 4)).double()

    def loss(self, model: Any, batch: Any) -> Tensor:
        self.Net.steps += 1
        return F.mse_loss(model(batch), batch)


class ModesInTurns(TrainingStep):
    """Eager steps, plain ones from the sixth to the tenth, and eager ones again."""

    taken = 0

    @property
    def next_mode(self) -> StepMode:
        return "plain" if 5 <= self.taken < 10 else "eager"

    def _timed(self, batch: Any) -> Tensor:
        mode, self.taken = self.next_mode, self.taken + 1
        return self._run(mode, batch)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """No steps are timed."""
    monkeypatch.setattr(fused_stepper, "modes_to_try", lambda profile, members: ("eager",))


def runtimes(task: Task, count: int = 3) -> list[TrialRuntime]:
    trials = [Trial(b, {"lr": 0.01 * (b + 1)}, seed=b, data_seed=0) for b in range(count)]
    return [build(task, Member(trial, 0, 1), CPU) for trial in trials]


class Run:
    """An array with its proof."""

    def __init__(
        self,
        task: Program,
        record: ProofRecord | None = None,
        clock: Callable[[], float] | None = None,
        members: int = 3,
    ) -> None:
        self.batch = X.to(task.dtype)
        self.record = ProofRecord(ProofCost(0.0)) if record is None else record
        self.proof = Proof(task, OutsideState(task, DataSets(task, CPU)), self.record, clock or Clock())
        self.stepper = FusedStepper(task, runtimes(task, members), proof=self.proof)
        self.step, self.members = 0, members

    def train(self, steps: int) -> dict[int, tuple[str, ...]]:
        """Train; return what was compared in each step in which something was."""
        found = {}
        for _ in range(steps):
            self.stepper.train_step([self.batch] * self.members, [self.step] * self.members)
            for runtime in self.stepper.runtimes:
                runtime.end_step()
            self.step += 1
            if rows := self.proof.take_rows():
                found[self.step] = tuple(f"{row.trial} {row.what}" for row in rows)
        return found

    def train_and_validate(self) -> None:
        self.train(3)
        self.validate()

    def validate(self) -> None:
        self.stepper.validate([self.batch, self.batch[:5]])


def transposed(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a square weight is transposed."""
    right = linear.batched_linear

    def faulty(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if w.shape[1] == w.shape[2] and w.requires_grad:
            w = w.detach() + (w - w.detach()).transpose(1, 2)
        return right(x, w, b)

    patch.setattr(linear, "batched_linear", faulty)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """Momentum is lost before each step."""
    right = FusedOptimizer.step

    def faulty(self: FusedOptimizer, *arguments: Any, **options: Any) -> None:
        for member in self.members:
            for state in member.state.values():
                state["momentum_buffer"].zero_()
        right(self, *arguments, **options)

    patch.setattr(FusedOptimizer, "step", faulty)


def kept(patch: pytest.MonkeyPatch) -> None:
    """Attributes that the array changes do not come to its members."""
    patch.setattr(AttributeSync, "push", lambda self, search=False: None)


def neighbours(patch: pytest.MonkeyPatch) -> None:
    """Each member has the means of the one before."""
    right = MetricMeans.add

    def faulty(self: MetricMeans, values: Mapping[str, Tensor], size: int) -> None:
        right(self, {name: column.roll(1, 0) for name, column in values.items()}, size)

    patch.setattr(MetricMeans, "add", faulty)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("kind", "plant", "message"),
    [
        (
            Momentum,
            transposed,
            r"gradient of `4.weight` .* \(trial \d, step 1 of epoch 1, eager, Program.loss \(",
        ),
        (Program, transposed, r"gradient of `4.weight` .*trial \d, step 1"),
        (Momentum, forgetful, r"parameter of `.*step 2 of epoch 1"),
        (Momentum, kept, "`seen` is 0 in the array, and 1 alone .*step 1"),
        (Momentum, neighbours, r"metric '\w+' has size .* in the array, and .* alone.*trial \d, validation of epoch 1"),
    ],
    ids=["gradient", "gradient with Adam", "momentum", "attribute", "metric"],
)
def test_what_an_array_computes_otherwise_is_refused(
    kind: type[Program], plant: Callable[[Any], None], message: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    run = Run(kind(dtype))
    with pytest.raises(StepRefusedError, match=message):
        run.train_and_validate()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("units", "refused"), [(10, False), (10**4, True)])
def test_an_activation_that_rounding_takes_across_a_kink_is_not_refused(
    units: int, refused: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = linear.batched_linear

    def off(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return right(x, w, b) + units * torch.finfo(dtype).eps

    monkeypatch.setattr(linear, "batched_linear", off)
    twin, changes = PlainCopy.twin, []

    def counted(self: PlainCopy, relative: float | None = None) -> PlainCopy:
        changes.append(relative and relative / torch.finfo(dtype).eps)
        return twin(self, relative)

    monkeypatch.setattr(PlainCopy, "twin", counted)
    run = Run(Kinked(dtype))
    with pytest.raises(StepRefusedError, match="alone") if refused else nullcontext():
        run.train(3)
    assert changes[:5] == [None, 1, None, KINK_UNITS, -KINK_UNITS], "each measurement takes one unchanged step"


@pytest.mark.parametrize(
    ("task", "largest"),
    [
        (Momentum(), 1e-12),
        (Program(), 1.0),
        (Momentum(torch.float32), 1e-3),
        (Program(torch.float32), 1.0),
        (Program(torch.float32, "bf16-mixed"), 1.0),
    ],
    ids=["float64", "Adam, bias before batch norm", "float32", "float32, Adam, bias before batch norm", "bf16-mixed"],
)
def test_rounding_is_not_refused(task: Program, largest: float) -> None:
    run = Run(task)
    run.stepper.train_step([run.batch] * 3, [0] * 3)
    rows = run.proof.take_rows()
    assert {(row.trial, row.what) for row in rows} == {(b, "step, eager") for b in range(3)}
    assert all(row.difference <= largest for row in rows)
    run.step = 1
    run.train(5)
    run.validate()
    assert {row.what for row in run.proof.take_rows()} == {"validation"}


def test_a_loss_that_nobody_can_repeat_is_refused_with_the_remedy() -> None:
    with pytest.raises(StepRefusedError, match=r"two runs of a step in plain PyTorch differ .*set `exact = False`"):
        Run(Differs()).train(1)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(StepRefusedError, match=r"the model cannot be copied .*lock"):
        Run(Locked())


def test_large_frozen_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Program()
    (runtime,) = runtimes(task, 1)
    runtime.model[0].requires_grad_(False)  # type: ignore[index]
    small = copied_bytes(runtime)
    copied = PlainCopy(task, runtime).runtime.model
    assert copied[0].weight.data_ptr() != runtime.model[0].weight.data_ptr()  # type: ignore[index]
    monkeypatch.setattr(frozen, "MIN_SHARED_BYTES", 100)
    copied = PlainCopy(task, runtime).runtime.model
    assert copied[0].weight.data_ptr() == runtime.model[0].weight.data_ptr()  # type: ignore[index]
    assert copied[3].weight.data_ptr() != runtime.model[3].weight.data_ptr()  # type: ignore[index]
    assert small - copied_bytes(runtime) == 25 * 8  # of the first layer


def test_a_copy_leaves_the_trial_as_it_is() -> None:
    task = Program()
    (runtime,) = runtimes(task, 1)
    before = {name: value.clone() for name, value in runtime.model.state_dict().items()}
    one = PlainCopy(task, runtime)
    one.step(runtime, X, 0)
    assert one.error is None
    assert all(torch.equal(value, before[name]) for name, value in runtime.model.state_dict().items())
    assert (runtime.model.seen, one.runtime.model.seen, len(runtime.optimizer.state)) == (0, 1, 0)


EAGER = {"0 step, eager", "1 step, eager", "2 step, eager"}


def test_windows_begin_with_the_array_and_at_steps_that_double() -> None:
    found = Run(Momentum()).train(132)
    assert list(found) == [1, 2, 3, 64, 65, 128, 129]
    assert set(found[1]) == EAGER
    assert all(len(found[step]) == 1 for step in (2, 3, 64, 65, 128, 129)), "one copy continues"


def test_a_window_begins_with_the_first_step_of_another_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_stepper, "TrainingStep", ModesInTurns)
    run = Run(Momentum())
    found = run.train(10)
    assert list(found) == [1, 2, 3, 6, 7]
    assert [text.partition(" ")[2] for text in (*found[6], *found[7])] == ["step, plain"] * 2
    assert run.record.proven == {"eager", "plain"}


def test_a_window_follows_a_compared_validation() -> None:
    run = Run(Momentum())
    run.train(4)
    run.validate()
    assert {row.what for row in run.proof.take_rows()} == {"validation"}
    assert list(run.train(5)) == [5, 6]
    run.validate()  # the second
    run.train(4)
    run.proof.take_rows()
    run.validate()  # the third, which is not compared
    assert run.proof.take_rows() == ()
    assert run.train(4) == {}


def test_a_new_array_is_checked_with_one_member() -> None:
    record = ProofRecord(ProofCost(0.0))
    assert list(Run(Momentum(), record).train(5)) == [1, 2, 3]
    again = Run(Momentum(), record).train(5)
    assert list(again) == [1, 2]
    assert {len(rows) for rows in again.values()} == {1}


def test_no_window_is_opened_once_the_allowance_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, record = Clock(), ProofRecord(ProofCost(0.0))
    run = Run(Momentum(), record, clock)
    run.train(4)
    record.cost.seconds = 1.0
    assert run.train(64) == {}
    assert Run(Momentum(), record, clock).train(3) == {}
    clock.now = 100.0  # of which 1 % is a second
    assert list(Run(Momentum(), record, clock).train(4)) == [1, 2]
    record.cost.seconds = 100.0
    monkeypatch.setattr(fused_stepper, "TrainingStep", ModesInTurns)
    # the first plain steps, and the first ones after these, are checked nevertheless
    assert list(Run(Momentum(), record, clock).train(20)) == [6, 7, 11, 12]


@pytest.mark.parametrize("task", [LastLayer(), Accumulates()], ids=["of other layers", "by hand"])
def test_copies_begin_with_the_gradients_that_earlier_steps_have_left(task: Program) -> None:
    run = Run(task)
    run.train(4)
    run.validate()
    assert {row.what for row in run.proof.take_rows()} == {"validation"}
    assert list(run.train(5)) == [5, 6]


def test_of_members_whose_steps_take_long_two_are_compared_and_one_in_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "CHEAP_SECONDS", -1.0)
    found = Run(Momentum()).train(130)
    assert {step: len(rows) for step, rows in found.items()} == {1: 2, 2: 1, 3: 1, 64: 1, 128: 1}


def test_a_copy_that_does_not_fit_into_the_memory_is_tried_at_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tried = Run(Momentum()), []

    def fails(copy: PlainCopy, *arguments: Any) -> None:
        tried.append(run.step + 1)
        copy.error = torch.OutOfMemoryError()

    monkeypatch.setattr(PlainCopy, "step", fails)
    assert run.train(130) == {}
    assert sorted(set(tried)) == [1, 64, 128]


def test_copies_for_a_validation_are_made_before_it() -> None:
    run = Run(Counts())
    run.train_and_validate()
    assert [row.what for row in run.proof.take_rows()][-2:] == ["validation"] * 2


def test_attributes_that_a_validation_changes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AttributeSync.push
    monkeypatch.setattr(
        AttributeSync, "push", lambda self, search=False: right(self, search) if self._template[0].training else None
    )
    with pytest.raises(StepRefusedError, match=r"`validated` is 0 in the array, and 2 alone .*validation of epoch 1"):
        Run(Remembers()).train_and_validate()


def test_plain_steps_of_one_trial_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Momentum(), members=1)
    assert run.train(1) == {1: ("0 step, eager",)}
    monkeypatch.setattr(fused_stepper, "modes_to_try", lambda profile, members: ("plain",))
    run = Run(Momentum(), members=1)
    assert run.train(3) == {}
    run.validate()
    assert run.proof.take_rows() == ()
    assert run.proof.changed_outside == ""


def test_what_plain_steps_of_one_trial_change_outside_of_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_stepper, "modes_to_try", lambda profile, members: ("plain",))
    run = Run(CountsOnClass(), members=1)
    with pytest.raises(StepRefusedError, match=r"steps change `Net.steps`, outside of the models"):
        run.train(3)
    assert run.proof.changed_outside == "Net.steps"


def test_an_attribute_that_nobody_can_repeat_is_named_with_the_remedy() -> None:
    message = r"two runs of a step in plain PyTorch differ in `stamp` \(.*set `exact = False`"
    with pytest.raises(StepRefusedError, match=message):
        Run(Stamped()).train(1)


def test_batches_of_other_shapes_each_time_are_not_taken_for_another_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_stepper, "modes_to_try", lambda profile, members: ("eager", "plain"))
    run, found = Run(Momentum()), {}
    for size in range(12, 2, -1):
        run.batch = X[:size]
        found |= run.train(1)
    assert list(found) == [1, 2, 3]


def compared(got: dict[Any, Any], want: dict[Any, Any]) -> Comparison:
    return Comparison.of(*({key: torch.tensor(value).double() for key, value in each.items()} for each in (got, want)))


def test_a_loss_that_is_zero_but_for_rounding_is_no_difference() -> None:
    found = compared({("loss", ""): 1e-17}, {("loss", ""): 0.0})
    assert found.beyond(torch.float64, {}) is None
    assert compared({("loss", ""): 1e-12}, {("loss", ""): 0.0}).beyond(torch.float64, {}) == ("loss", "")


def test_a_loss_of_zero_may_change_if_gradients_do_not() -> None:
    found = compared({("loss", ""): 1e-17, ("gradient", "w"): 1.0}, {("loss", ""): 0.0, ("gradient", "w"): 1.0})
    assert found.change() == 0.0
    assert compared({("loss", ""): 1e-17}, {("loss", ""): 0.0}).change() == float("inf")


@pytest.mark.parametrize(
    ("large", "small"),
    [
        (("buffer", "steps"), ("buffer", "scale")),
        (("optimizer state", "w: step"), ("optimizer state", "w: exp_avg_sq")),
    ],
)
def test_a_small_tensor_is_not_hidden_by_a_large_one_of_another_meaning(large: Any, small: Any) -> None:
    found = compared({large: 1e9, small: 2e-8}, {large: 1e9, small: 1e-8})
    assert found.beyond(torch.float64, {}) == small


@pytest.mark.parametrize(("difference", "counts"), [(1, True), (2, True), (100, True), (1.5, False), (3, False)])
def test_differences_of_one_sample_or_two_are_counts(difference: float, counts: bool) -> None:
    assert counts_samples(difference / 64, 64) == counts


@dataclass
class Meter:
    total: float = 0.0
    marks: Any = ()


class Holder(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.inner = nn.Tanh()
        self.inner.held = held


def drawn(generator: Any, draw: Callable[[Any], Any]) -> Any:
    draw(generator)
    return generator


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        (1, 2, "`inner.held` is 1 in the array, and 2 alone"),
        (1, 1.0, "`inner.held` is 1 in the array, and 1.0 alone"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"`inner.held\['a'\]\[1\]` is 2 in the array, and 3 alone"),
        ([1.0], [1.0, 2.0], "`inner.held` has 1 entries in the array and 2 alone"),
        ({}, {"mask": torch.ones(2)}, r"`inner.held` has 0 entries in the array and 1 alone \('mask'\)"),
        (deque([1]), deque([2]), r"`inner.held\[0\]` is 1"),
        ({1, 2}, {1, 3}, "`inner.held` is a set in the array, and a set alone"),
        (Counter("ab"), Counter("aa"), "`inner.held` has 2 entries"),
        (Meter(1.0), Meter(2.0), "`inner.held.total` is 1.0 in the array, and 2.0 alone"),
        (
            Meter(1.0, [torch.zeros(2)]),
            Meter(1.0, [torch.ones(2)]),
            r"the tensor `inner.held.marks\[0\]` has other values",
        ),
        (torch.ones(2), torch.ones(3), "the tensor `inner.held` has other values"),
        (np.ones(2), np.zeros(2), "the array `inner.held` has other values"),
        (drawn(random.Random(0), lambda one: one.random()), random.Random(0), "generator `inner.held` has drawn other"),
        (
            drawn(np.random.default_rng(0), lambda one: one.random()),
            np.random.default_rng(0),
            "generator `inner.held` has drawn other",
        ),
        (
            torch.Generator().manual_seed(0),
            torch.Generator().manual_seed(1),
            "generator `inner.held` has drawn other",
        ),
        (None, torch.ones(2), "`inner.held` is None in the array, and a Tensor alone"),
        (1.0, 1.0 + 1e-12, None),
        (float("nan"), float("nan"), None),
        ([torch.ones(2)], [nn.Parameter(torch.ones(2))], None),
        (torch.ones(2), torch.ones(2) + 1e-12, None),
        (Meter(1.0, {"a": (1, 2)}), Meter(1.0, {"a": (1, 2)}), None),
        (len, max, None),
    ],
)
def test_attributes_are_compared_value_by_value(got: Any, want: Any, message: str | None) -> None:
    found = first_difference(Holder(got), Holder(want), 1e-9)
    assert (found is None) == (message is None), found
    if message is not None:
        assert re.search(message, str(found)), found


def test_an_attribute_that_is_missing_is_named() -> None:
    got, want = Holder(1), Holder(1)
    want.inner.late = 2  # type: ignore[assignment]
    assert first_difference(got, want, 1e-9) == "`inner` has 2 entries in the array and 3 alone ('late')"


def test_what_refers_to_itself_is_compared_once() -> None:
    got: list[Any] = [1]
    want: list[Any] = [1]
    got.append(got)
    want.append(want)
    assert first_difference(Holder(got), Holder(want), 1e-9) is None
