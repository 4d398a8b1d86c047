"""Steps are compiled only if compiling saves time, and compiled steps give the same results."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal.fuse.capture_decision as decision_module
import shoal.fuse.step as step_module
from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CompiledAheadError
from shoal.fuse.capture_decision import RETRY_SECONDS, CaptureDecision
from shoal.fuse.compile_cache import COMPILED, CompileRecord
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.race import RaceRules
from shoal.fuse.step import TrainingStep, modes_to_try
from shoal.plan.cost.capturing import capturing_pays

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
KNOWN = Profile({1: 1.0, 2: 1.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={2: 1e6}, compile_seconds=1e-6)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


def members(count: int = 2) -> tuple[ModelArray, FusedOptimizer]:
    models, optimizers = [], []
    for b in range(count):
        torch.manual_seed(b)
        models.append(nn.Linear(3, 3).double())
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.1 * (b + 1)))
    array = fuse(models, range(count))
    return array, fuse_optimizers(optimizers, array)


def stepping(array: ModelArray, optimizer: FusedOptimizer, profile: Profile, decision: CaptureDecision) -> TrainingStep:
    modes = modes_to_try(profile, len(array))
    return TrainingStep(array, optimizer, loss, modes, decision, Clock.look, profile=profile)


class Captured:
    """Replaces a captured step by an eager one with a given duration."""

    taken = 0
    delay = 0.0
    compiled = True
    """Whether all are compiled; otherwise all are recorded."""

    def __init__(
        self,
        array: ModelArray,
        optimizer: FusedOptimizer,
        fn: Any,
        batch: Any,
        compiling: bool,
        trained: Any,
        limits: Tensor | None,
        ahead: Callable[..., bool] | None,
    ) -> None:
        assert compiling is self.compiled
        assert limits is None
        if compiling and ahead is not None and ahead(torch.fx.GraphModule({}, torch.fx.Graph()), ()):
            raise CompiledAheadError("another process compiles the step")
        self.array, self.optimizer, self.fn, self.shape = array, optimizer, fn, batch.shape

    def fits(self, batch: Tensor) -> bool:
        return batch.shape == self.shape

    def __call__(self, batch: Tensor) -> Tensor:
        Captured.taken += 1
        Clock.now += Captured.delay
        self.optimizer.zero_grad()
        losses = self.array.map(self.fn, batch)
        losses.sum().backward()
        self.optimizer.step()
        return losses.detach()


class Clock:
    """Simulated clock that advances by the time of one eager step per read."""

    now = 0.0

    @classmethod
    def look(cls) -> float:
        cls.now += 1.0
        return cls.now


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "CapturedStep", Captured)
    monkeypatch.setattr(Captured, "taken", 0)


def plain(steps: int, count: int = 2) -> Tensor:
    array, optimizer = members(count)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = array.map(loss, X)
        losses.sum().backward()
        optimizer.step()
    return losses.detach()


CASES = {
    "a compiled step that is faster is kept": (KNOWN, -0.9, 10**6, True),
    "one that is slower is dropped after it was measured": (KNOWN, 5.0, 10**6, False),
    "none is tried when few steps are left": (KNOWN, 0.0, 0, None),
}


@pytest.mark.parametrize(("profile", "delay", "steps", "kept"), CASES.values(), ids=CASES)
def test_choice(profile: Profile, delay: float, steps: int, kept: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Captured, "delay", delay)
    array, optimizer = members()
    chosen = stepping(array, optimizer, profile, CaptureDecision(profile, 2, steps))
    assert chosen.mode is None
    uncaptured = 2 * (RaceRules.min_runs + 1)
    total = 2 * uncaptured + RaceRules.min_runs
    for _ in range(total):
        losses = chosen(X)
    torch.testing.assert_close(losses, plain(total), rtol=1e-12, atol=0)
    slow = 2  # steps until it is clear
    # The best of the others takes turns with it.
    assert (chosen.mode == "compiled") is bool(kept)
    assert Captured.taken == {True: total - uncaptured - slow, False: slow, None: 0}[kept]
    assert chosen.new_profile is not None
    assert chosen.new_profile.fused_gain == {2: 1.0}
    assert chosen.new_profile.step_seconds.keys() == profile.step_seconds.keys() | {2}, (
        "the time of a larger size is new"
    )
    if kept is None:
        assert chosen.new_profile.compiled_gain == profile.compiled_gain
    else:
        assert (chosen.new_profile.compiled_gain[2] > 1) is kept
        assert chosen.new_profile.compile_seconds > 0


NEVER = replace(KNOWN, compiled_gain={2: 1.0})


@pytest.mark.parametrize(
    ("profile", "left", "recorded"),
    [
        pytest.param(NEVER, 500, False, id="500 steps of 1 s save 250 s, and recording costs 125 s"),
        pytest.param(NEVER, 501, True, id="one more"),
        pytest.param(replace(NEVER, recorded_gain={2: 1.25}, record_seconds=3.0), 29, False, id="29 save 5.8 of 6 s"),
        pytest.param(replace(NEVER, recorded_gain={2: 1.25}, record_seconds=3.0), 31, True, id="31 save 6.2 s"),
        pytest.param(replace(NEVER, recorded_gain={2: 1.0}), 10**6, False, id="it was not faster"),
        pytest.param(NEVER, None, True, id="the caller does not say how many steps are left"),
    ],
)
def test_a_step_is_recorded_only_where_that_is_expected_to_pay_off(
    profile: Profile, left: int | None, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Captured, "delay", -0.9)
    monkeypatch.setattr(Captured, "compiled", False)
    monkeypatch.setattr(step_module, "records_graphs", lambda device: True)
    array, optimizer = members()
    if left is None:
        chosen = TrainingStep(array, optimizer, loss, clock=Clock.look, profile=profile)
    else:
        chosen = stepping(array, optimizer, profile, CaptureDecision(profile, 2, 2 * (RaceRules.min_runs + 1) + left))
    while chosen.mode is None:
        chosen(X)
    assert (chosen.mode == "captured") is recorded
    assert chosen.new_profile is not None
    if recorded:
        assert chosen.new_profile.recorded_gain[2] == pytest.approx(10.0)
        assert chosen.new_profile.record_seconds == 1.0
    else:
        assert chosen.new_profile.recorded_gain == profile.recorded_gain


def test_a_step_that_cannot_be_recorded_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise FusionError("it cannot be captured")

    monkeypatch.setattr(step_module, "CapturedStep", refuse)
    monkeypatch.setattr(step_module, "records_graphs", lambda device: True)
    array, optimizer = members()
    chosen = stepping(array, optimizer, NEVER, CaptureDecision(NEVER, 2, 10**6))
    while chosen.mode is None:
        chosen(X)
    assert chosen.new_profile is not None
    assert not CaptureDecision(chosen.new_profile, 2, 10**9).should_record(1.0)


@pytest.mark.parametrize("profile", [KNOWN, NEVER], ids=["compiled", "recorded"])
def test_a_profile_learns_nothing_of_a_capture_without_memory(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(*arguments: Any) -> Any:
        tried.append(arguments)
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(step_module, "CapturedStep", fail)
    monkeypatch.setattr(step_module, "records_graphs", lambda device: profile is NEVER)
    array, optimizer = members()
    chosen = stepping(array, optimizer, profile, CaptureDecision(profile, 2, 10**6))
    while chosen.mode is None:
        chosen(X)
    assert len(tried) == 1
    assert chosen.mode == "eager"
    assert chosen.new_profile is not None
    for name in ("recorded_gain", "record_seconds", "compiled_gain", "compile_seconds"):
        assert getattr(chosen.new_profile, name) == getattr(profile, name)


def test_a_batch_of_another_shape_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Captured, "delay", -0.9)
    array, optimizer = members()
    chosen = stepping(array, optimizer, KNOWN, CaptureDecision(KNOWN, 2, 10**6))
    for _ in range(4 * (RaceRules.min_runs + 1)):
        chosen(X)
    taken = Captured.taken
    assert chosen(X[:2]).shape == (2,)
    assert Captured.taken == taken
    chosen(X)
    assert Captured.taken == taken + 1


def test_a_step_that_cannot_be_compiled_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise FusionError("it cannot be captured")

    monkeypatch.setattr(step_module, "CapturedStep", refuse)
    array, optimizer = members()
    decision = CaptureDecision(KNOWN, 2, 10**6, record=CompileRecord("refused"))
    chosen = stepping(array, optimizer, KNOWN, decision)
    for _ in range(2 * (RaceRules.min_runs + 1)):
        chosen(X)
    assert not CompileRecord("refused").exists
    assert CompileRecord("refused").begin(), "others may try"
    assert chosen.new_profile is not None
    assert chosen.new_profile.compiled_gain[2] == 1.0
    assert not capturing_pays("compiled", chosen.new_profile, 2, 1.0, 10**9)


@pytest.mark.parametrize(
    ("lone", "compiling", "reloading"),
    [
        pytest.param(False, 100.0, 1.0, id="two members"),
        pytest.param(True, 100.0, 1.0, id="a lone member"),
        pytest.param(False, 0.5, 0.0, id="the code was not found"),
    ],
)
def test_an_array_takes_the_compiled_step_once_another_process_has_compiled_it(
    lone: bool, compiling: float, reloading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(KNOWN, compile_seconds=compiling)
    monkeypatch.setattr(Captured, "delay", -0.9)
    array, optimizer = members(1 if lone else 2)
    other, now = CompileRecord(f"waited for, {lone}, {compiling}"), [0.0]
    assert other.begin()
    decision = CaptureDecision(
        known, 2, 10**6, record=CompileRecord(f"waited for, {lone}, {compiling}"), clock=lambda: now[0]
    )
    chosen = stepping(array, optimizer, known, decision)
    for _ in range(4 * (RaceRules.min_runs + 1)):
        chosen(X)
    assert chosen.mode is not None
    assert not chosen.stays_plain, "a stepper that trains plainly cannot compile any more"
    now[0] += RETRY_SECONDS
    chosen(X)
    assert Captured.taken == 0, "the other process compiles"
    other.end(compiled=True)
    chosen(X)
    assert Captured.taken == 0, "it is not asked for at every step"
    now[0] += RETRY_SECONDS
    for _ in range(4 * (RaceRules.min_runs + 1)):
        losses = chosen(X)
    assert Captured.taken > RaceRules.min_runs
    assert chosen.new_profile is not None
    assert chosen.new_profile.reload_seconds == reloading
    assert chosen.new_profile.compile_seconds == compiling
    assert decision.steps == 10**6 - 8 * (RaceRules.min_runs + 1) - 2
    torch.testing.assert_close(losses, plain(10**6 - decision.steps, len(array)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("found", [pytest.param(True, id="compiled"), pytest.param(False, id="killed")])
def test_an_array_takes_its_steps_while_a_process_beside_compiles(
    found: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    inherited: list[int] = []
    monkeypatch.setattr(decision_module, "is_compiling", lambda: False)
    monkeypatch.setattr(decision_module, "compile_ahead", lambda graph, example, lock: inherited.append(os.dup(lock)))
    monkeypatch.setattr(Captured, "delay", -0.9)
    array, optimizer = members()
    known, now = replace(KNOWN, compile_seconds=100.0), [0.0]
    record = CompileRecord(request.node.name)
    decision = CaptureDecision(known, 2, 10**6, record=record, clock=lambda: now[0], ahead=True)
    chosen = stepping(array, optimizer, known, decision)

    def take_steps() -> None:
        now[0] += RETRY_SECONDS
        for _ in range(4 * (RaceRules.min_runs + 1)):
            losses = chosen(X)
        torch.testing.assert_close(losses, plain(10**6 - decision.steps), rtol=1e-12, atol=0)

    take_steps()
    take_steps()
    assert len(inherited) == 1, "one process is started"
    assert (Captured.taken, chosen.stays_plain) == (0, False)
    assert chosen.compile_seconds == 0
    assert (chosen.new_profile or known).compiled_gain == known.compiled_gain, "nothing is known yet"
    if found:
        os.write(inherited[0], COMPILED)
    os.close(inherited[0])
    take_steps()
    assert len(inherited) == 1
    assert Captured.taken > RaceRules.min_runs
    assert decision.reloads is found
    assert record.exists
    assert chosen.new_profile is not None
    assert (chosen.new_profile.reload_seconds, chosen.new_profile.compile_seconds) == ((1, 100) if found else (0, 1))


def test_the_first_process_lets_others_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Captured, "delay", -0.9)
    array, optimizer = members()
    decision = CaptureDecision(KNOWN, 2, 10**6, record=CompileRecord("first"))
    chosen = stepping(array, optimizer, KNOWN, decision)
    for _ in range(4 * (RaceRules.min_runs + 1)):
        chosen(X)
    assert CompileRecord("first").exists
    assert chosen.new_profile is not None
    assert chosen.new_profile.compile_seconds > KNOWN.compile_seconds
    assert chosen.new_profile.reload_seconds == 0
