"""`GradScaler`: each member's scale and steps equal those of a `torch.amp.GradScaler`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from optim_twins import Make, Twins, same
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from shoal.core.errors import FusionError
from shoal.fuse.api import concat, fuse
from shoal.fuse.grads import clip_grad_norm_
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.scaler import GradScaler

SETTINGS = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}


class Counting(SGD):
    """A subclass whose own step leaves a mark outside of its state."""

    calls = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.calls += 1
        self.param_groups[0]["calls"] = self.calls
        return super().step(closure)


MAKES: dict[str, Make] = {
    "sgd": lambda model, b: SGD(model.parameters(), lr=0.1 / (b + 1)),
    "momentum": lambda model, b: SGD(model.parameters(), lr=0.1, momentum=0.5 + 0.05 * b, dampening=0.1),
    "adam": lambda model, b: Adam(model.parameters(), lr=0.01 * (b + 1)),
    "adamw-amsgrad": lambda model, b: AdamW(model.parameters(), lr=0.01 * (b + 1), amsgrad=True),
    "adagrad": lambda model, b: Adagrad(model.parameters(), lr=0.01 * (b + 1), initial_accumulator_value=0.5),
    "rmsprop": lambda model, b: RMSprop(model.parameters(), lr=0.01 * (b + 1), centered=True, momentum=0.5),
    "subclass": lambda model, b: Counting(model.parameters(), lr=0.1 / (b + 1), momentum=0.5),
    "classes": lambda model, b: (Adam if b % 2 else SGD)(model.parameters(), lr=0.01),
}


class Scaled:
    """`twins` under a fused scaler, and those alone under one of torch's each."""

    def __init__(self, twins: Twins, **settings: Any) -> None:
        self.twins = twins
        members = len(twins.alone)
        self.fused = GradScaler(twins.array, **settings)
        self.alone = []
        for b in range(members):
            own = {name: value[b] if isinstance(value, Sequence) else value for name, value in settings.items()}
            self.alone.append(torch.amp.GradScaler("cpu", **own))

    def step(self, overflows: Mapping[int, float]) -> None:
        """One step, with a value of a member's gradient replaced."""
        twins = self.twins
        twins.give_grads()
        weight = twins.array.get_parameter("stacked.weight")
        for b, value in overflows.items():
            weight.grad[b, 0, 1] = value
            twins.alone[b].weight.grad[0, 1] = value
        self.fused.scale(torch.ones(len(twins.alone)))
        self.fused.step(twins.fused)
        self.fused.update()
        for scaler, optimizer in zip(self.alone, twins.optimizers, strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()

    def check(self) -> None:
        assert self.fused.get_scale().tolist() == [scaler.get_scale() for scaler in self.alone]
        assert self.fused.state_dict() == [scaler.state_dict() for scaler in self.alone]
        self.twins.check()


INF, NAN = float("inf"), float("nan")
COURSE: list[dict[int, float]] = [
    {0: INF},
    {},
    {1: NAN, 0: -INF},
    {},
    {},
    {},
    dict.fromkeys(range(10), INF),
    {1: INF},
    {},
]
"""What overflows at each step: before state has begun, among others, all at once."""


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_equals_the_members_own_scalers(make: Make) -> None:
    members = 3
    scaled = Scaled(Twins(make, members), **SETTINGS)
    for overflows in COURSE:
        scaled.step({b: value for b, value in overflows.items() if b < members})
        scaled.check()


def test_settings_of_each_member() -> None:
    scaled = Scaled(
        Twins(MAKES["adam"], 3),
        init_scale=[8.0, 2.0**127, 3.0],
        growth_factor=[1.5, 3.0, 2.0],
        backoff_factor=[0.5, 0.25, 0.9],
        growth_interval=[1, 1, 2],
    )
    for overflows in COURSE[:6]:
        scaled.step(overflows)
        scaled.check()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def networks(members: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Net().double() for _ in range(members)]


@pytest.mark.parametrize("clipped", [False, True])
def test_a_whole_step(clipped: bool) -> None:
    """Losses that overflow by themselves, and gradients that are clipped once unscaled."""
    models = networks(3)
    alone = copy.deepcopy(models)
    array = fuse(models)
    make = MAKES["adam"]
    optimizer = fuse_optimizers([make(model, b) for b, model in enumerate(models)], array)
    optimizers = [make(model, b) for b, model in enumerate(alone)]
    scaler = GradScaler(array, **SETTINGS)
    scalers = [torch.amp.GradScaler("cpu", **SETTINGS) for _ in alone]
    for step in range(4):
        x = torch.randn(5, 3, dtype=torch.float64)
        factors = torch.tensor([1.0, 1e308 if step == 1 else 1.0, 2.0], dtype=torch.float64)
        optimizer.zero_grad()
        losses = array(x)
        scaler.scale(losses * factors).sum().backward()
        if clipped:
            scaler.unscale_(optimizer)
            clip_grad_norm_(array, 0.01)
        scaler.step(optimizer)
        scaler.update()
        for b, (model, own, other) in enumerate(zip(alone, optimizers, scalers, strict=True)):
            own.zero_grad()
            other.scale(model(x) * factors[b]).backward()
            if clipped:
                other.unscale_(own)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            other.step(own)
            other.update()
    assert scaler.get_scale().tolist() == [other.get_scale() for other in scalers]
    assert scaler.get_scale()[0] != scaler.get_scale()[1]
    for b, (mine, other) in enumerate(zip(array.unfuse(), alone, strict=True)):
        same(mine.state_dict(), other.state_dict(), 1e-9, f"weights of {b}")


def test_what_an_optimizer_does_not_update_is_left_alone() -> None:
    """Each member's overflow counts where that member's optimizer looks."""
    models = networks(2)
    array = fuse(models)
    heads = [SGD(model.layers[2].parameters(), lr=0.1) for model in models]
    bodies: list[Optimizer] = [SGD(models[0].layers[0].parameters(), lr=0.1), SGD(models[1].parameters(), lr=0.1)]
    head, body = fuse_optimizers(heads, array), fuse_optimizers(bodies, array)
    scaler = GradScaler(array, init_scale=4.0)
    for parameter in array.parameters():
        parameter.grad = torch.full_like(parameter, 8.0)
    array.get_parameter("stacked.layers.2.weight").grad[:, 0, 0] = INF
    scaler.unscale_(body)
    assert array.get_parameter("stacked.layers.0.weight").grad.unique().tolist() == [2.0]
    assert array.get_parameter("stacked.layers.2.bias").grad.tolist() == [[8.0, 8.0], [2.0, 2.0]]
    before = copy.deepcopy(models)
    scaler.step(body)
    moved = [not torch.equal(m.layers[0].weight, n.layers[0].weight) for m, n in zip(models, before, strict=True)]
    assert moved == [True, False]
    array.get_parameter("stacked.layers.2.weight").grad.fill_(1.0)
    scaler.step(head)
    scaler.update()
    assert scaler.get_scale().tolist() == [4.0, 2.0]


@pytest.mark.parametrize("kind", ["adam", "classes", "subclass"])
def test_parameters_of_one_member(kind: str) -> None:
    """An overflow in what only one member has skips all of that member's step."""
    make = MAKES[kind]
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, b), nn.Linear(b, 2))) for b in (1, 2, 3)]
    alone = copy.deepcopy(models)
    array = fuse(models, strict=False)
    optimizer = fuse_optimizers([make(model, b) for b, model in enumerate(models)], array)
    optimizers = [make(model, b) for b, model in enumerate(alone)]
    scaler = GradScaler(array, **SETTINGS)
    scalers = [torch.amp.GradScaler("cpu", **SETTINGS) for _ in alone]
    for step in range(5):
        x = torch.randn(5, 3)
        optimizer.zero_grad()
        scaler.scale(array.map(lambda model, x: model(x).square().mean(), x)).sum().backward()
        for model, own, other in zip(alone, optimizers, scalers, strict=True):
            own.zero_grad()
            other.scale(model(x).square().mean()).backward()
        if step in (0, 2):
            models[1][1][0].bias.grad[0] = alone[1][1][0].bias.grad[0] = INF
        scaler.step(optimizer)
        scaler.update()
        for own, other in zip(optimizers, scalers, strict=True):
            other.step(own)
            other.update()
        assert scaler.get_scale().tolist() == [other.get_scale() for other in scalers]
    for b, (mine, model) in enumerate(zip(models, alone, strict=True)):
        same(mine.state_dict(), model.state_dict(), 1e-5, f"weights of {b}")
        same(optimizer.unfuse()[b].state_dict(), optimizers[b].state_dict(), 1e-5, f"state of {b}")


@pytest.mark.parametrize("dim", [1, 2])
def test_types_of_scaled_losses_are_those_of_the_members(dim: int) -> None:
    losses = torch.ones(2, *[3] * (dim - 1), dtype=torch.float16)
    scaler, alone = GradScaler(fuse(networks(2)), init_scale=2.0**10), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled, expected = scaler.scale(losses), alone.scale(losses[0])
    assert scaled.dtype == expected.dtype
    assert torch.equal(scaled[0], expected)


def test_state_comes_from_torch_and_goes_there() -> None:
    given = [{**SETTINGS, "scale": 2.0 + b, "growth_interval": 5 + b, "_growth_tracker": b} for b in range(3)]
    states = [{name: value for name, value in state.items() if name != "init_scale"} for state in given]
    scaler = GradScaler(fuse(networks(3)))
    scaler.load_state_dict(states)
    for own, state in zip(scaler.state_dict(), states, strict=True):
        other = torch.amp.GradScaler("cpu")
        other.load_state_dict(own)
        assert other.state_dict() == {**state, "scale": torch.tensor(state["scale"]).item()}


def test_states_go_with_their_members_through_select_and_concat() -> None:
    """A new scaler for each new array, with the states of its members."""
    scaled, other = Scaled(Twins(MAKES["adam"], 3), **SETTINGS), Scaled(Twins(MAKES["adam"], 2, seed=5), **SETTINGS)
    for overflows in COURSE[:4]:
        scaled.step(overflows)
        other.step({1 - b: value for b, value in overflows.items()})
    twins, joining, keep = scaled.twins, other.twins, [2, 0]
    states = [*(scaled.fused.state_dict()[b] for b in keep), *other.fused.state_dict()]
    twins.array = concat([twins.array.select(keep), joining.array])
    twins.own = [*(twins.own[b] for b in keep), *joining.own]
    twins.alone = [*(twins.alone[b] for b in keep), *joining.alone]
    twins.optimizers = [*(twins.optimizers[b] for b in keep), *joining.optimizers]
    twins.fused = fuse_optimizers(twins.own, twins.array)
    scaled.fused = GradScaler(twins.array)
    scaled.fused.load_state_dict(states)
    scaled.alone = [*(scaled.alone[b] for b in keep), *other.alone]
    assert len(set(scaled.fused.get_scale().tolist())) > 1
    scaled.check()
    for overflows in COURSE[4:]:
        scaled.step({b: value for b, value in overflows.items() if b < 4})
        scaled.check()


def test_disabled() -> None:
    models = networks(2)
    array = fuse(models)
    optimizer = fuse_optimizers([SGD(model.parameters(), lr=1.0) for model in models], array)
    scaler = GradScaler(array, enabled=False)
    losses = torch.ones(2)
    assert scaler.scale(losses) is losses
    for parameter in array.parameters():
        parameter.grad = torch.full_like(parameter, INF)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert models[0].layers[0].weight.isinf().all()
    assert scaler.get_scale().tolist() == [1.0, 1.0]
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.state_dict() == [{}, {}]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"init_scale": [1.0, 2.0]}, r"`scale` must be one number or 3, got shape \(2,\)"),
    "growth": ({"growth_factor": [2.0, 1.0, 2.0]}, r"`growth_factor` must be above 1, got \[2.0, 1.0, 2.0\]"),
    "backoff": ({"backoff_factor": 1.0}, "`backoff_factor` must be below 1, got 1.0"),
}


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        GradScaler(fuse(networks(3)), **settings)


def test_wrong_order_of_calls() -> None:
    models = networks(2)
    array = fuse(models)
    optimizer = fuse_optimizers([SGD(model.parameters(), lr=1.0) for model in models], array)
    scaler = GradScaler(array)
    with pytest.raises(FusionError, match="`update` is called before `step`"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(FusionError, match="already called with this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(FusionError, match="already called with this optimizer"):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)


def test_gradients_of_half_precision() -> None:
    models = [model.half() for model in networks(2)]
    array = fuse(models)
    optimizer = fuse_optimizers([SGD(model.parameters(), lr=1.0) for model in models], array)
    array.get_parameter("stacked.layers.0.bias").grad = torch.ones(2, 4, dtype=torch.float16)
    with pytest.raises(FusionError, match=r"gradient of 'layers\.0\.bias' is float16.*torch\.autocast"):
        GradScaler(array).step(optimizer)


def test_empty_states() -> None:
    with pytest.raises(FusionError, match=r"states of members \[1\] are empty"):
        GradScaler(fuse(networks(2))).load_state_dict([torch.amp.GradScaler("cpu").state_dict(), {}])


@pytest.mark.parametrize("enabled", [True, False])
def test_losses_that_were_summed_are_refused(enabled: bool) -> None:
    """A sum has no axis of members: each scale would reach the gradients of all."""
    scaler = GradScaler(fuse([nn.Linear(2, 1) for _ in range(3)]), enabled=enabled)
    for wrong in (torch.tensor(1.0), torch.ones(2)):
        with pytest.raises(FusionError, match=r"of all 3 members.*before they are summed"):
            scaler.scale(wrong)
