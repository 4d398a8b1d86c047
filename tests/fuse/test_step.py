"""`TrainingStep` takes the fastest of several modes, all of which compute the same."""

import copy
from collections.abc import Callable
from itertools import count, groupby
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from twins import build, close

import shoal
import shoal.fuse.step as step_module
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.race import RaceRules
from shoal.fuse.step import PATIENCE, StepMode, TrainingStep

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def net(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(rate), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def layer(rate: float = 0.0) -> nn.Module:
    """As little as there is to compile."""
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(rate))


def array_of(
    members: int, rate: float = 0.0, make: Callable[[float], nn.Module] = net
) -> tuple[ModelArray, FusedOptimizer]:
    models = build(lambda: make(rate), members)
    array = fuse(models, seeds=range(members))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01 * (b + 1), eps=1e-2) for b, m in enumerate(models)]
    return array, fuse_optimizers(optimizers, array)


def states(array: ModelArray) -> list[dict[str, Tensor]]:
    return [member.state_dict() for member in array.unfuse()]


@pytest.mark.pairwise
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("own", [False, True], ids=["shared batch", "own batches"])
def test_plain_steps_equal_eager_ones(members: int, rate: float, own: bool) -> None:
    batch: Any = (X, Y)
    if own:
        batch = shoal.stack([(X + b, Y) for b in range(members)])
    results = []
    for mode in ("eager", "plain"):
        array, optimizer = array_of(members, rate)
        step = TrainingStep(array, optimizer, loss, (mode,))
        losses = torch.stack([step(copy.copy(batch)) for _ in range(4)])
        results.append((losses, states(array), [o.state_dict()["state"] for o in optimizer.unfuse()]))
    (losses, weights, _), (others, other_weights, _) = results
    close(losses, others, "losses")
    for b in range(members):
        for name, value in weights[b].items():
            close(other_weights[b][name], value, f"{name} of {b}")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (layer, 0.0),
        (layer, 0.3),
        (net, 0.3),
    ],
)
def test_a_compiled_step_equals_the_others(make: Callable[[float], nn.Module], rate: float) -> None:
    results = []
    for modes in (("eager",), ("eager", "compiled")):
        array, optimizer = array_of(3, rate, make)
        step = TrainingStep(array, optimizer, loss, modes, compiling=lambda seconds: True, clock=count().__next__)
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # not tried out in a process that imports torch
            losses = torch.stack([step((X, Y)) for _ in range(4 * (RaceRules.min_runs + 1))])
        results.append((losses, states(array)))
        assert set(step.seconds) == set(modes)
    close(results[0][0], results[1][0], "losses")
    for mine, others in zip(results[0][1], results[1][1], strict=True):
        for name, value in mine.items():
            close(others[name], value, name)


def test_what_was_captured_fits_again_after_a_validation() -> None:
    array, optimizer = array_of(2, 0.0)
    TrainingStep(array, optimizer, loss, ("eager",))((X, Y))
    captured = CapturedStep(array, optimizer, loss, (X, Y), compiling=False)
    assert captured.fits((X, Y))
    with torch.no_grad():
        array.eval().map(loss, (X, Y))
    assert not captured.fits((X, Y))
    array.train()
    assert captured.fits((X, Y))


def test_what_was_fastest_so_far_is_timed_again_beside_what_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first steps of a process are slow, the compiled step would else be held against those."""
    array, optimizer = array_of(1, 0.0)
    step = TrainingStep(array, optimizer, loss, ("plain", "compiled"), compiling=lambda seconds: True)
    passed = {"plain": 9.0, "compiled": 2.0}
    now = 0.0

    def clock() -> float:
        return now

    def run(mode: StepMode, batch: Any) -> Tensor:
        nonlocal now
        now += passed[mode]
        return torch.zeros(1)

    def capture(*args: Any, **options: Any) -> Any:
        passed["plain"] = 1.0
        return lambda batch: torch.zeros(1)

    monkeypatch.setattr(step, "_clock", clock)
    monkeypatch.setattr(step, "_run", run)
    monkeypatch.setattr(step_module, "CapturedStep", capture)
    while step.mode is None:
        step((X, Y))
    assert step.mode == "plain"
    assert step.seconds == {"plain": 1.0, "compiled": 2.0}


@pytest.mark.parametrize(("seconds", "chosen"), [(0.97, "plain"), (0.9, "compiled")])
def test_a_mode_that_has_to_be_made_must_win_by_a_margin(
    seconds: float, chosen: StepMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, optimizer = array_of(1, 0.0)
    step = TrainingStep(array, optimizer, loss, ("plain", "compiled"), compiling=lambda seconds: True)
    passed = {"plain": 1.0, "compiled": seconds}
    now = 0.0

    def run(mode: StepMode, batch: Any) -> Tensor:
        nonlocal now
        now += passed[mode]
        return torch.zeros(1)

    monkeypatch.setattr(step, "_clock", lambda: now)
    monkeypatch.setattr(step, "_run", run)
    monkeypatch.setattr(step_module, "CapturedStep", lambda *args, **options: lambda batch: torch.zeros(1))
    while step.mode is None:
        step((X, Y))
    assert step.mode == chosen


class Clock:
    """Each step takes the seconds of its mode, of which the first one takes ten times as many."""

    def __init__(self, seconds: dict[StepMode, float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.took: list[StepMode] = []

    def __call__(self) -> float:
        return self.now

    def watch(self, step: TrainingStep) -> None:
        for mode, run in list(step._runs.items()):
            step._runs[mode] = self._timed(mode, run)

    def _timed(self, mode: StepMode, run: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def timed(batch: Any) -> Tensor:
            self.now += self.seconds[mode] * (1 if mode in self.took else 10)
            self.took.append(mode)
            return run(batch)

        return timed


@pytest.mark.parametrize(
    ("eager", "plain", "chosen", "steps"),
    [
        (1.0, 1.2, "eager", 8),
        (1.2, 1.0, "plain", 8),
        (1.0, 9.0, "eager", 4),
        (9.0, 1.0, "plain", 4),
        (1.0e-4, 1.1e-4, "eager", 54),  # short ones more often
    ],
)
def test_the_fastest_mode_is_kept(eager: float, plain: float, chosen: StepMode, steps: int) -> None:
    clock = Clock({"eager": eager, "plain": plain})
    array, optimizer = array_of(2)
    step = TrainingStep(array, optimizer, loss, clock=clock)
    clock.watch(step)
    while step.mode is None:
        step((X, Y))
    assert step.mode == chosen
    assert len(clock.took) == steps
    assert step.seconds == {"eager": pytest.approx(eager), "plain": pytest.approx(plain)}
    step((X, Y))
    assert clock.took[-1] == chosen


@pytest.mark.parametrize(("seconds", "bursts"), [(1.0e-3, [4, 4, 4, 4]), (0.03, [1, 1, 1, 1])])
def test_short_steps_take_turns_in_bursts(seconds: float, bursts: list[int]) -> None:
    """Long ones alternate: caches matter little to them."""
    clock = Clock(dict.fromkeys(("eager", "plain"), seconds))
    array, optimizer = array_of(2)
    step = TrainingStep(array, optimizer, loss, clock=clock)
    clock.watch(step)
    for _ in range(sum(bursts)):
        announced = step.next_mode
        step((X, Y))
        assert step.last_mode == announced
    assert [(mode, len(list(run))) for mode, run in groupby(clock.took)] == [
        *zip(("eager", "plain", "eager", "plain"), bursts, strict=True)
    ]


def test_batches_of_other_shapes_are_not_timed() -> None:
    clock = Clock({"eager": 1.0, "plain": 2.0})
    array, optimizer = array_of(2)
    step = TrainingStep(array, optimizer, loss, clock=clock)
    clock.watch(step)
    for _ in range(3):
        step((X, Y))
        step((X[:3], Y[:3]))
    assert clock.took == ["eager", "eager", "plain", "eager", "eager", "eager"]
    assert step.mode is None


def test_compiling_is_asked_for_once_and_again_on_request() -> None:
    asked: list[float] = []

    def worth(seconds: float) -> bool:
        asked.append(seconds)
        return False

    clock = Clock({"eager": 2.0, "plain": 1.5})
    array, optimizer = array_of(2)
    step = TrainingStep(array, optimizer, loss, compiling=worth, clock=clock)
    clock.watch(step)
    for _ in range(12):
        step((X, Y))
    assert asked == [pytest.approx(1.5)]
    step.reconsider_compiling()
    for _ in range(3):
        step((X, Y))
    assert asked == [pytest.approx(1.5)] * 2
    assert step.mode == "plain"


def test_one_member_runs_as_itself() -> None:
    array, optimizer = array_of(1)
    step = TrainingStep(array, optimizer, loss)
    while step.mode is None:
        step((X, Y))
    assert step.mode == "plain"


def test_an_error_names_the_users_line() -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].T).sum()

    array, optimizer = array_of(2)
    with pytest.raises(RuntimeError) as caught:
        TrainingStep(array, optimizer, wrong)((X, Y))
    assert any(entry.name == "wrong" for entry in caught.traceback)
    assert any("of 2 members, for one member: shared (4, 6), each (8, 4)" in note for note in caught.value.__notes__)


def test_an_array_that_was_left_cannot_step() -> None:
    array, optimizer = array_of(2)
    step = TrainingStep(array, optimizer, loss, ("plain",))
    array.select([0])
    with pytest.raises(FusionError, match="have left this array"):
        step((X, Y))


def test_a_member_that_comes_to_draw_is_refused_once() -> None:
    def drawing(model: Any, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(F.dropout(out, 0.5) if bool(model.num_batches_tracked > 3) else out, batch[1])

    models = build(lambda: nn.BatchNorm1d(4), 2)
    array = fuse(models, seeds=range(2))
    optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in models], array)
    step = TrainingStep(array, optimizer, drawing, ("plain",))
    for _ in range(3):
        step((X, Y))
    with pytest.raises(
        FusionError, match=r"drawing \(test_step.py:\d+\) had drawn no random numbers and draws some now"
    ):
        step((X, Y))
    step((X, Y))


@pytest.mark.parametrize("modes", [(), ("compiled",), ("eager", "fast")])
def test_modes_are_checked(modes: Any) -> None:
    with pytest.raises(FusionError, match="`modes` must name 'eager' or 'plain'"):
        TrainingStep(*array_of(2), loss, modes)


def test_gradients_of_before_are_not_stepped_with() -> None:
    results = []
    for stale in (False, True):
        array, optimizer = array_of(2)
        if stale:
            for member in array.members:
                loss(member, (X + 1, Y)).backward()
            for member in array.members:
                member[2].reset_running_stats()
        step = TrainingStep(array, optimizer, loss, ("plain",))
        for member in array.members:
            member[2].reset_running_stats()
        step((X, Y))
        results.append(states(array))
    for mine, other in zip(*results, strict=True):
        for name, value in mine.items():
            close(other[name], value, name)


def test_a_plain_step_that_fails_leaves_no_gradients() -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        if model is array.members[1]:
            value.register_hook(lambda grad: model[0].weight.register_hook(broken) and None)
        return value

    def broken(grad: Tensor) -> Tensor:
        raise ArithmeticError("in backward")

    array, optimizer = array_of(2)
    with pytest.raises(ArithmeticError):
        TrainingStep(array, optimizer, fails, ("plain",))((X, Y))
    assert all(own.grad is None for _, _, members in array.stacked_tensors() for own in members)
    assert all(parameter.grad is None for parameter in array.parameters())


def test_shapes_that_do_not_come_again_are_given_up() -> None:
    clock = Clock({"eager": 2.0, "plain": 1.0})
    array, optimizer = array_of(2)
    step = TrainingStep(array, optimizer, loss, clock=clock)
    clock.watch(step)
    step((X, Y))
    for _ in range(PATIENCE + 2 * (RaceRules.min_runs + 1)):
        step((X[:4], Y[:4]))
    assert step.mode == "plain"


def test_shapes_that_vary_for_ever_leave_the_mode_that_is_allowed() -> None:
    array, optimizer = array_of(2)
    step = TrainingStep(array, optimizer, loss, ("plain",))
    step((X, Y))
    for i in range(2 * PATIENCE):
        rows = 7 + i
        step((X[:1].expand(rows, 4) + torch.arange(rows)[:, None], Y[:1].expand(rows)))
    assert step.mode == "plain"
    assert not step.seconds
