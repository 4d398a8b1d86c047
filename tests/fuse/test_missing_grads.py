"""Parameters with a gradient in some members only: the other members' parameters do not change, as in plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_twins import Make, same
from optimizer_factories import LOWERINGS, OTHERS, RULES
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.grads import clip_grad_norm_
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.optim.param_group_batch import Lowering
from shoal.fuse.scaler import GradScaler
from shoal.fuse.step import TrainingStep

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Skipping(nn.Module):
    """Leaves out a layer, depending on its number of calls and on what is in its buffer."""

    def __init__(self, b: int) -> None:
        super().__init__()
        torch.manual_seed(b)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(b))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if int(self.calls) % 3 == 0:
            return x + self.bias
        return (x @ self.weight.T) * self.scale + self.bias


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Sides:
    """An array with its optimizer, and the same members alone."""

    array: ModelArray
    fused: FusedOptimizer

    def __init__(self, make: Make, members: int, lowering: Lowering | None = None) -> None:
        self.alone = [Skipping(b) for b in range(members)]
        models = copy.deepcopy(self.alone)
        self.optimizers = [make(model, b) for b, model in enumerate(self.alone)]
        self.array = fuse(models)
        own = [make(model, b) for b, model in enumerate(models)]
        self.fused = fuse_optimizers(own, self.array, lowering=lowering)

    def step_alone(self, x: Tensor, passes: int = 1, clip: float | None = None, order: float = 2.0) -> None:
        for model, optimizer in zip(self.alone, self.optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(passes):
                loss(model, x).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip, order)
            optimizer.step()

    def check(self) -> None:
        for b, (mine, other) in enumerate(zip(self.array.unfuse(), self.alone, strict=True)):
            same(mine.state_dict(), other.state_dict(), 1e-9, f"weights of {b}")
        for b, (own, other) in enumerate(zip(self.fused.unfuse(), self.optimizers, strict=True)):
            same(own.state_dict(), other.state_dict(), 1e-9, f"state of {b}")


def by_map(sides: Sides, x: Tensor, passes: int = 1) -> None:
    sides.fused.zero_grad()
    for _ in range(passes):
        sides.array.map(loss, x).sum().backward()


POSSIBLE = {name: make for name, make in RULES.items() if name != "sgd-fused"}
"""Of torch's own; its fused SGD fails when a parameter has its first gradient later than others."""


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("make", POSSIBLE.values(), ids=POSSIBLE)
def test_rules(make: Make, lowering: Lowering) -> None:
    sides = Sides(make, 3, lowering)
    for _ in range(5):
        by_map(sides, X)
        sides.fused.step()
        sides.step_alone(X)
    sides.check()


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_optimizers_that_step_by_themselves(make: Make) -> None:
    sides = Sides(make, 3)
    for _ in range(5):
        by_map(sides, X)
        sides.fused.step()
        sides.step_alone(X)
    sides.check()


MAKES = {name: RULES[name] for name in ("sgd-dampening", "adam")}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_training_member_after_member(make: Make) -> None:
    sides = Sides(make, 4)
    step = TrainingStep(sides.array, sides.fused, loss, ways=("plain",))
    for _ in range(5):
        step(X)
        sides.step_alone(X)
        sides.check()


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_accumulated_gradients(make: Make) -> None:
    sides = Sides(make, 4)
    for _ in range(4):
        by_map(sides, X, passes=2)
        sides.fused.step()
        sides.step_alone(X, passes=2)
        sides.check()


def test_two_runs_in_one_backward_pass() -> None:
    sides = Sides(MAKES["adam"], 4)
    for _ in range(4):
        sides.fused.zero_grad()
        (sides.array.map(loss, X) + sides.array.map(loss, X)).sum().backward()
        sides.fused.step()
        sides.step_alone(X, passes=2)
        sides.check()


def test_gradients_that_were_made_zero_are_gradients() -> None:
    """As `zero_grad(set_to_none=False)` leaves them; momentum goes on."""
    sides = Sides(MAKES["sgd-dampening"], 3)
    for _ in range(5):
        sides.fused.zero_grad(set_to_none=False)
        sides.array.map(loss, X).sum().backward()
        sides.fused.step()
        for model, optimizer in zip(sides.alone, sides.optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            loss(model, X).backward()
            optimizer.step()
        sides.check()


def _zeros(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients of zeros, by members that look at their own buffers."""
    assert int(model.calls) > 0
    return (model.weight * 0).sum() + model.scale * 0 + model.bias.sum() * 0


@pytest.mark.parametrize("fns", [(loss, _zeros), (_zeros, loss)], ids=["zeros last", "zeros first"])
def test_zeros_of_another_run_are_gradients(fns: tuple[Callable[..., Any], ...]) -> None:
    sides = Sides(MAKES["adam"], 3)
    for model in (*sides.alone, *sides.array.members):
        model.calls += 3
    for _ in range(4):
        sides.fused.zero_grad()
        torch.stack([sides.array.map(fn, X) for fn in fns]).sum().backward()
        sides.fused.step()
        for model, optimizer in zip(sides.alone, sides.optimizers, strict=True):
            optimizer.zero_grad()
            torch.stack([fn(model, X) for fn in fns]).sum().backward()
            optimizer.step()
        sides.check()


def _set_gradient(model: nn.Module, x: Tensor) -> Tensor:
    model.calls += 1
    if int(model.calls) % 3 == 0:
        model.weight.grad = torch.ones_like(model.weight)
    else:
        model.bias.grad = None
    return x.sum()


def test_gradients_that_members_set_themselves() -> None:
    sides = Sides(MAKES["adam"], 4)
    for _ in range(4):
        sides.fused.zero_grad()
        sides.array.map(_set_gradient, X)
        sides.fused.step()
        for model, optimizer in zip(sides.alone, sides.optimizers, strict=True):
            optimizer.zero_grad()
            _set_gradient(model, X)
            optimizer.step()
        sides.check()


@pytest.mark.parametrize("order", [2.0, -1.0])
def test_clipped(order: float) -> None:
    sides = Sides(MAKES["adam"], 3)
    for _ in range(4):
        by_map(sides, X)
        clip_grad_norm_(sides.array, 0.1, order)
        sides.fused.step()
        sides.step_alone(X, clip=0.1, order=order)
        sides.check()


def test_with_a_scaler() -> None:
    """Member 1's third loss overflows: it alone makes no step then, and the layers left out stay as they are."""
    sides = Sides(MAKES["adam"], 3)
    scaler = GradScaler(sides.array, init_scale=8.0)
    alone = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(3)]
    for turn in range(5):
        factors = [float("inf") if (turn, b) == (2, 1) else 1.0 for b in range(3)]
        sides.fused.zero_grad()
        losses = sides.array.map(loss, X) * torch.tensor(factors, dtype=torch.float64)
        scaler.scale(losses).sum().backward()
        scaler.step(sides.fused)
        scaler.update()
        for model, optimizer, own, factor in zip(sides.alone, sides.optimizers, alone, factors, strict=True):
            optimizer.zero_grad()
            own.scale(loss(model, X) * factor).backward()
            own.step(optimizer)
            own.update()
        sides.check()


def test_a_member_sees_that_it_has_none() -> None:
    seen: list[list[bool]] = []

    def look(model: nn.Module, x: Tensor) -> Tensor:
        seen.append([parameter.grad is None for parameter in model.parameters()])
        return loss(model, x)

    sides = Sides(MAKES["adam"], 3)
    by_map(sides, X)
    sides.array.map(look, X)
    for model in sides.alone:
        loss(model, X).backward()
    assert seen[-3:] == [[parameter.grad is None for parameter in model.parameters()] for model in sides.alone]


def _all_take_part(model: nn.Module, x: Tensor) -> Tensor:
    return (x @ model.weight.T).square().mean() * model.scale + model.bias.sum()


@pytest.mark.parametrize("run", [_all_take_part], ids=["at once"])
def test_what_was_noted_does_not_outlast_its_gradients(run: Callable[..., Any]) -> None:
    """The array's next run is of all members at once, and gives a member zeros, which are a gradient."""
    sides = Sides(MAKES["adam"], 3)
    zero = torch.zeros_like(X)
    for fn, x in ((loss, X), (run, zero), (loss, X), (run, zero)):
        sides.fused.zero_grad()
        sides.array.map(fn, x).sum().backward()
        sides.fused.step()
        for model, optimizer in zip(sides.alone, sides.optimizers, strict=True):
            optimizer.zero_grad()
            fn(model, x).backward()
            optimizer.step()
        sides.check()
