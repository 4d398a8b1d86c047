"""Training steps with a loss scale for each member: as plain loops with a `torch.amp.GradScaler` each."""

import copy
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from twins import build, close

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.backward import MicroBatches
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.scaler import GradScaler, LossScale
from shoal.fuse.step import StepMode, TrainingStep

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SETTINGS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
LIMIT = 0.1


class Counted(SGD):
    """A class without a fused rule."""


MAKES: dict[str, Callable[[nn.Module, int], Optimizer]] = {
    "momentum": lambda model, b: SGD(model.parameters(), lr=0.05 * (b + 1), momentum=0.9),
    "alike": lambda model, b: Adam(model.parameters(), lr=0.01, eps=1e-2),
    "adam": lambda model, b: Adam(model.parameters(), lr=0.01 * (b + 1), eps=1e-2),
    "classes": lambda model, b: (Adam if b % 2 else SGD)(model.parameters(), lr=0.01),
    "own": lambda model, b: Counted(model.parameters(), lr=0.05 * (b + 1), momentum=0.9),
}


class Net(nn.Module):
    """Its loss is infinite in steps of which the bit at its place is set."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.register_buffer("place", torch.tensor(2**place))

    def forward(self, batch: Any) -> Tensor:
        x, overflows = batch
        return self.layers(x).square().mean() * torch.where(overflows & self.place != 0, torch.inf, 1.0)


def loss(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch)
    return out


def nets(members: int) -> list[nn.Module]:
    models = build(lambda: Net(0), members)
    for b, model in enumerate(models):
        model.place.fill_(2**b)
    return models


COURSE = [0b010, 0, 0b001, 0, 0, 0b111, 0, 0b010, 0b010, 0, 0, 0b001, 0, 0]
"""Members that overflow in each step: in the first one, all at once, one twice in a row. Modes take turns meanwhile."""


def state_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [copy.deepcopy(dict(state)) for state in optimizer.state.values()]


@pytest.mark.in_turns
@pytest.mark.parametrize("modes", [("eager",), ("plain",), ("eager", "plain")], ids="-".join)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("accumulated", [False, True])
def test_equals_loops_with_a_scaler_each(
    modes: tuple[StepMode, ...], make: Callable[[nn.Module, int], Optimizer], accumulated: bool
) -> None:
    check_course(COURSE, modes, make, accumulated)


def test_a_member_that_left_out_a_plain_step_counts_less_in_eager_ones() -> None:
    """Plain steps are taken from the fifth on, and eager ones again from the ninth on."""
    check_course([0, 0, 0, 0, 0, 0b010, 0, 0, 0, 0], ("eager", "plain"), MAKES["alike"])


def check_course(
    course: Sequence[int],
    modes: tuple[StepMode, ...],
    make: Callable[[nn.Module, int], Optimizer],
    accumulated: bool = False,
) -> None:
    """Compare an array, step by step, with models of which each has a loop of its own.

    Args:
        course: Members that overflow in each step, as bits.
        modes: Modes of the training step.
        make: Makes the optimizer of a member.
        accumulated: Whether a step has two batches.
    """
    models, alone = nets(3), nets(3)
    array = fuse(models)
    optimizer = fuse_optimizers([make(model, b) for b, model in enumerate(models)], array)
    scaler = GradScaler(array, **SETTINGS)
    step = TrainingStep(array, optimizer, loss, modes, clock=count(0, 1e-6).__next__, max_norm=LIMIT, scaler=scaler)
    optimizers = [make(model, b) for b, model in enumerate(alone)]
    scalers = [torch.amp.GradScaler("cpu", **SETTINGS) for _ in alone]
    for overflows in course:
        x = torch.randn(6, 3, dtype=torch.float64)
        parts = [(x[:2], torch.tensor(0)), (x[2:], torch.tensor(overflows))]
        micro = MicroBatches(tuple(parts), (0.25, 0.75)) if accumulated else MicroBatches((parts[1],), (1.0,))
        pairs = zip(models, optimizer.members, strict=True)
        before = [(copy.deepcopy(model.state_dict()), state_of(own)) for model, own in pairs]
        losses = step(micro)
        for b, (model, own, other) in enumerate(zip(alone, optimizers, scalers, strict=True)):
            own.zero_grad()
            total = 0.0
            for part, weight in zip(*micro, strict=True):
                value = weight * model(part)
                other.scale(value).backward()
                total += value.item()
            assert losses[b].item() == pytest.approx(total, rel=1e-9)
            other.unscale_(own)
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            other.step(own)
            other.update()
            mine, state = before[b]
            if overflows >> b & 1:  # bitwise
                torch.testing.assert_close(models[b].state_dict(), mine, rtol=0, atol=0)
                torch.testing.assert_close(state_of(optimizer.members[b]), state, rtol=0, atol=0)
            for name, value in models[b].state_dict().items():
                close(value, model.state_dict()[name], f"{name} of {b}")
            state, expected = optimizer.unfuse()[b].state_dict()["state"], own.state_dict()["state"]
            torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)
        assert scaler.state_dict() == [other.state_dict() for other in scalers]


@pytest.mark.parametrize("mode", ["eager", "plain"])
def test_an_overflow_changes_nothing_for_the_others(mode: StepMode) -> None:
    """Bitwise: an array beside the same array in which one member never overflows."""
    found = []
    for course in (COURSE, [overflows & ~0b010 for overflows in COURSE]):
        models = nets(3)
        array = fuse(models)
        optimizer = fuse_optimizers([MAKES["adam"](model, b) for b, model in enumerate(models)], array)
        step = TrainingStep(array, optimizer, loss, (mode,), max_norm=LIMIT, scaler=GradScaler(array, **SETTINGS))
        for overflows in course:
            step((X, torch.tensor(overflows)))
        found.append([model.state_dict() for model in array.unfuse()])
    for b, (beside, quiet) in enumerate(zip(*found, strict=True)):
        same = all(torch.equal(beside[name], quiet[name]) for name in quiet)
        assert same is (b != 1)


def test_a_step_with_a_loss_scale_is_neither_captured_nor_compiled() -> None:
    models = nets(3)
    array = fuse(models)
    optimizer = fuse_optimizers([MAKES["adam"](model, b) for b, model in enumerate(models)], array)

    def never(seconds: float) -> bool:
        raise AssertionError(seconds)

    modes: tuple[StepMode, ...] = ("eager", "captured", "compiled")
    step = TrainingStep(array, optimizer, loss, modes, compiling=never, scaler=GradScaler(array))
    while step.mode is None:
        step((X, torch.tensor(0)))
    assert step.mode == "eager"


def test_a_scaler_of_another_array_is_refused() -> None:
    array, other = fuse(nets(2)), fuse(nets(2))
    optimizer = fuse_optimizers([MAKES["adam"](model, b) for b, model in enumerate(array.members)], array)
    with pytest.raises(FusionError, match=r"`scaler` must be a `shoal\.GradScaler` of this array"):
        TrainingStep(array, optimizer, loss, scaler=GradScaler(other))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_single_scale_equals_that_of_torch(sparse: bool) -> None:
    twins = build(lambda: nn.Embedding(4, 2, sparse=sparse), 1, torch.float32)
    alone = build(lambda: nn.Embedding(4, 2, sparse=sparse), 1, torch.float32)
    own, other = SGD(twins[0].parameters(), lr=0.1), SGD(alone[0].parameters(), lr=0.1)
    scale, expected = LossScale(3.0, growth_interval=2), torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2)
    for factor in (1.0, 1.0, torch.inf, 1.0, torch.nan, torch.inf, 1.0, 1.0, 1.0):
        values = [model(torch.tensor([1, 3])).square().mean() * factor for model in (*twins, *alone)]
        own.zero_grad()
        scale.scaled(values[0]).backward()
        scale.unscale_(own)
        if not scale.overflowed:
            own.step()
        scale.update()
        other.zero_grad()
        expected.scale(values[1]).backward()
        expected.step(other)
        expected.update()
        assert scale.state_dict() == expected.state_dict()
        assert torch.equal(twins[0].weight, alone[0].weight)
    again = LossScale()
    again.load_state_dict(expected.state_dict())
    assert again.state_dict() == scale.state_dict()


def test_a_single_scale_refuses_gradients_of_half_precision() -> None:
    model = nn.Linear(2, 1).half()
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(FusionError, match="a gradient is float16"):
        LossScale().unscale_(SGD(model.parameters(), lr=0.1))
