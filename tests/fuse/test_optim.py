from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_twins import Make, Net, Twins, same
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from shoal.errors import FusionError
from shoal.fuse.array import fuse
from shoal.fuse.optim.cohort import Cohort
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.loop import MemberLoop

LOWERINGS = ("kernels", "elementwise")


def plain(cls: type[Optimizer], **options: Any) -> Make:
    """An optimizer of all parameters; a callable option is given the member's index."""

    def make(model: nn.Module, b: int) -> Optimizer:
        return cls(model.parameters(), **{k: v(b) if callable(v) else v for k, v in options.items()})

    return make


def grouped(cls: type[Optimizer], first: dict[str, Any], second: dict[str, Any]) -> Make:
    """Biases in a group of their own, and `scale` in none."""

    def make(model: nn.Module, b: int) -> Optimizer:
        groups = [{"params": [model.weight, model.unused], **first}, {"params": [model.bias], **second}]
        return cls([{k: v(b) if callable(v) else v for k, v in group.items()} for group in groups])

    return make


def lr(b: int) -> float:
    return 0.1 / (b + 1)


RULES: dict[str, Make] = {
    "sgd": plain(SGD, lr=lr),
    "sgd-decay": plain(SGD, lr=lr, weight_decay=lambda b: 0.1 * b),
    "sgd-momentum": plain(SGD, lr=lr, momentum=lambda b: 0.5 + 0.1 * b, weight_decay=lambda b: 0.01 * b),
    "sgd-dampening": plain(SGD, lr=lr, momentum=0.9, dampening=lambda b: 0.1 * b),
    "sgd-nesterov": plain(SGD, lr=lr, momentum=lambda b: 0.9 - 0.1 * b, nesterov=True, weight_decay=0.01),
    "sgd-maximize": plain(SGD, lr=lr, momentum=0.9, weight_decay=0.01, maximize=True),
    "sgd-foreach": plain(SGD, lr=lr, momentum=0.9, foreach=True),
    "sgd-fused": plain(SGD, lr=lr, momentum=0.9, fused=True),
    "sgd-tensor-lr": plain(SGD, lr=lambda b: torch.tensor(lr(b), dtype=torch.float64)),
    "sgd-groups": grouped(SGD, {"lr": lr, "momentum": 0.9}, {"lr": 0.3, "nesterov": True, "momentum": 0.5}),
    "adam": plain(Adam, lr=lr),
    "adam-numbers": plain(
        Adam,
        lr=lr,
        betas=lambda b: (0.9 - 0.1 * b, 0.999 - 0.01 * b),
        eps=lambda b: 10.0 ** -(b + 3),
        weight_decay=lambda b: 0.1 * b,
    ),
    "adam-amsgrad": plain(Adam, lr=lr, amsgrad=True, betas=lambda b: (0.9, 0.5 + 0.1 * b)),
    "adam-maximize": plain(Adam, lr=lr, maximize=True, weight_decay=0.1),
    "adam-decoupled": plain(Adam, lr=lr, decoupled_weight_decay=True, weight_decay=lambda b: 0.1 * b),
    "adam-foreach": plain(Adam, lr=lr, foreach=True),
    "adam-tensors": plain(
        Adam,
        lr=lambda b: torch.tensor([lr(b)], dtype=torch.float64),
        betas=lambda b: (torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.95, dtype=torch.float64)),
    ),
    "adam-groups": grouped(Adam, {"lr": lr}, {"lr": 0.01, "amsgrad": True, "weight_decay": lambda b: 0.1 * b}),
    "adamw": plain(AdamW, lr=lr, weight_decay=lambda b: 0.1 * b),
    "adamw-amsgrad": plain(AdamW, lr=lr, amsgrad=True, maximize=True),
    "adamw-fused": plain(AdamW, lr=lr, fused=True),
}


def alternate(*makes: Make) -> Make:
    return lambda model, b: makes[b % len(makes)](model, b)


class Doubled(SGD):
    """A subclass whose step is its own."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        super().step(closure)
        return super().step(closure)


OTHERS: dict[str, Make] = {
    "momentum-of-some": plain(SGD, lr=lr, momentum=lambda b: 0.9 * (b % 2)),
    "nesterov-of-some": plain(SGD, lr=lr, momentum=0.9, nesterov=lambda b: b > 1),
    "amsgrad-of-some": plain(Adam, lr=lr, amsgrad=lambda b: b in (1, 2)),
    "classes": alternate(RULES["adam"], RULES["sgd-momentum"], RULES["adamw"]),
    "groups-of-some": alternate(RULES["adam"], RULES["adam-groups"]),
    "empty-group": lambda model, b: SGD([{"params": []}, {"params": [model.weight], "lr": lr(b)}]),
    "rule-of-some": alternate(RULES["adam"], plain(torch.optim.RMSprop, lr=0.01)),
    "rmsprop": plain(torch.optim.RMSprop, lr=lr, momentum=0.5, centered=True),
    "adagrad": plain(torch.optim.Adagrad, lr=lr),
    "subclass": plain(Doubled, lr=lr, momentum=0.9),
}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("make", [*RULES.values(), *OTHERS.values()], ids=[*RULES, *OTHERS])
def test_equals_the_members_own_optimizers(make: Make, members: int, lowering: Any) -> None:
    twins = Twins(make, members, lowering=lowering)
    twins.step(2)
    twins.check()
    twins.step(8)
    twins.check()


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_rules_run_all_members_together(make: Make) -> None:
    twins = Twins(make, 3)
    assert all(isinstance(unit, Cohort) for unit in twins.fused._units)
    assert len(twins.fused._units) == len(twins.own[0].param_groups)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("make", [RULES["sgd-dampening"], RULES["adam"]], ids=["sgd", "adam"])
def test_a_parameter_without_gradient_is_skipped(make: Make, lowering: Any) -> None:
    twins = Twins(make, 3, lowering=lowering)
    for skip in (["unused", "bias"], ["unused", "weight"], ["unused", "weight", "bias", "scale"], ["unused"]):
        twins.step(2, skip)
        twins.check()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_complex_parameters(cls: type[Optimizer], lowering: Any) -> None:
    options = {"momentum": 0.9} if cls is SGD else {"amsgrad": True}
    twins = Twins(plain(cls, lr=lr, weight_decay=0.1, **options), 3, lowering=lowering, dtype=torch.complex128)
    twins.step(5)
    twins.check()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str
)
@pytest.mark.parametrize("name", ["sgd-nesterov", "adam-decoupled"])
def test_other_dtypes(name: str, dtype: torch.dtype, rtol: float, lowering: Any) -> None:
    twins = Twins(RULES[name], 3, lowering=lowering, dtype=dtype)
    twins.step(5)
    twins.check(rtol)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_half_precision_is_computed_in_float32(lowering: Any) -> None:
    """An eps of 1e-8 is nothing in float16: a gradient of zero would divide zero by zero."""
    twins = Twins(RULES["adam"], 2, lowering=lowering, dtype=torch.float16)
    before = twins.array.get_parameter("stacked.weight").detach().clone()
    for param in twins.array.parameters():
        param.grad = torch.zeros_like(param)
    twins.fused.step()
    assert torch.equal(twins.array.get_parameter("stacked.weight"), before)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("cls", [SGD, Adam])
def test_dtypes_in_one_model(cls: Any, lowering: Any) -> None:
    models = [Net() for _ in range(2)]
    for model in models:
        model.bias = nn.Parameter(model.bias.detach().float())
    array = fuse(models)
    fused = fuse_optimizers([cls(model.parameters(), lr=0.1) for model in models], array, lowering=lowering)
    before = [p.detach().clone() for p in array.parameters()]
    for param in array.parameters():
        param.grad = torch.ones_like(param)
    fused.step()
    for param, old in zip(array.parameters(), before, strict=True):
        torch.testing.assert_close(param, old - 0.1)


def test_gradients_of_any_layout() -> None:
    twins = Twins(RULES["adam"], 3)
    for _ in range(3):
        twins.give_grads()
        weight = twins.array.get_parameter("stacked.weight")
        weight.grad = weight.grad.transpose(1, 2).contiguous().transpose(1, 2)
        assert not weight.grad.is_contiguous()
        twins.fused.step()
        for optimizer in twins.optimizers:
            optimizer.step()
    twins.check()


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_a_nan_stays_with_its_member(make: Make, lowering: Any) -> None:
    poisoned, clean = (Twins(make, 3, lowering=lowering) for _ in range(2))
    for twins in (poisoned, clean):
        for n in range(3):
            twins.give_grads()
            if twins is poisoned and n == 1:
                for param in twins.array.parameters():
                    if param.grad is not None:
                        param.grad[1] = float("nan")
            twins.fused.step()
    assert poisoned.array.members[1].weight.isnan().all()
    for b in (0, 2):
        same(poisoned.array.members[b].state_dict(), clean.array.members[b].state_dict(), 0, "weights")
        same(poisoned.own[b].state_dict(), clean.own[b].state_dict(), 0, "state")


def test_numbers_are_read_at_every_step() -> None:
    twins = Twins(RULES["adam-tensors"], 3)
    twins.step(2)
    version = twins.fused.version
    for side in (twins.own, twins.optimizers):
        for b, optimizer in enumerate(side):
            optimizer.param_groups[0]["lr"].mul_(0.5 + b)
    twins.step(2)
    for side in (twins.own, twins.optimizers):
        for b, optimizer in enumerate(side):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * b
    twins.step(2)
    twins.check()
    assert twins.fused.version == version


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_settings_that_change_the_rule(lowering: Any) -> None:
    twins = Twins(RULES["sgd"], 3, lowering=lowering)
    twins.step(2)
    version = twins.fused.version
    for side in (twins.own, twins.optimizers):
        side[1].param_groups[0].update(momentum=0.9, dampening=0.5)
    twins.step(2)
    twins.check()
    for side in (twins.own, twins.optimizers):
        side[0].param_groups[0]["momentum"] = 0.8
        side[1].param_groups[0]["momentum"] = 0
    twins.step(2)
    for side in (twins.own, twins.optimizers):
        side[1].param_groups[0]["momentum"] = 0.7
    twins.step(2)
    twins.check()
    assert twins.fused.version > version


def test_a_group_added_later() -> None:
    twins = Twins(RULES["adam-groups"], 3)
    twins.step(2)
    sides = ((twins.own, twins.array.members), (twins.optimizers, twins.alone))
    for optimizers, models in sides:
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.add_param_group({"params": [model.scale], "lr": 0.2})
    twins.step(2)
    twins.check()


def test_hooks_are_called() -> None:
    twins = Twins(RULES["adam"], 3)
    twins.step(1)
    calls: list[Optimizer] = []
    handle = twins.own[1].register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    twins.step(2)
    handle.remove()
    twins.step(2)
    twins.check()
    assert calls == [twins.own[1]] * 2
    assert len(twins.fused._units) == 1


def test_differentiable_steps_by_itself() -> None:
    models = [Net() for _ in range(2)]
    fused = fuse_optimizers([Adam(m.parameters(), differentiable=True) for m in models], fuse(models))
    assert all(isinstance(unit, MemberLoop) for unit in fused._units)


def test_a_single_member_runs_as_the_array_does() -> None:
    """The whole loop: forward, backward, step, against each model alone."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in range(3)]
    alone = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in range(3)]
    for model, other in zip(models, alone, strict=True):
        other.load_state_dict(model.state_dict())
    makes = [RULES["adam-numbers"](model, b) for b, model in enumerate(models)]
    others = [RULES["adam-numbers"](model, b) for b, model in enumerate(alone)]
    array = fuse(models)
    fused = fuse_optimizers(makes, array)
    x, y = torch.randn(6, 4).double(), torch.randn(6, 1).double()
    for _ in range(5):
        fused.zero_grad()
        array.map(lambda model: nn.functional.mse_loss(model(x), y)).sum().backward()
        fused.step()
        for model, optimizer in zip(alone, others, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    for model, other in zip(array.unfuse(), alone, strict=True):
        same(model.state_dict(), other.state_dict(), 1e-9, "weights")


def test_zero_grad() -> None:
    twins = Twins(RULES["sgd-groups"], 2)
    for param in twins.array.parameters():
        param.grad = torch.ones_like(param)
    twins.fused.zero_grad(set_to_none=False)
    assert twins.array.get_parameter("stacked.weight").grad.eq(0).all()
    twins.fused.zero_grad()
    assert twins.array.get_parameter("stacked.bias").grad is None
    assert twins.array.get_parameter("stacked.scale").grad.eq(1).all(), "no member updates it"


class Moving(Optimizer):
    """Puts its parameters into new memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.data = param.data * 2


def test_refusals() -> None:
    models = [Net() for _ in range(3)]
    array = fuse(models)
    optimizers = [SGD(m.parameters(), lr=0.1) for m in models]
    with pytest.raises(FusionError, match="array of 3 members needs as many optimizers, got 2"):
        fuse_optimizers(optimizers[:2], array)
    with pytest.raises(FusionError, match=r"optimizer of member 1 updates 'weight' of member 2; .* in the order"):
        fuse_optimizers([optimizers[0], optimizers[2], optimizers[1]], array)
    with pytest.raises(FusionError, match=r"member 2 updates a tensor that is no parameter of its model .*group 0"):
        fuse_optimizers([*optimizers[:2], SGD(Net().parameters(), lr=0.1)], array)
    with pytest.raises(FusionError, match="member 0, LBFGS, needs a closure"):
        fuse_optimizers([torch.optim.LBFGS(m.parameters()) for m in models], array)
    fused = fuse_optimizers(optimizers, array)
    with pytest.raises(FusionError, match="takes no closure"):
        fused.step(lambda: 0.0)  # type: ignore[arg-type]
    weight = array.get_parameter("stacked.weight")
    weight.grad = torch.zeros_like(weight).to_sparse()
    with pytest.raises(FusionError, match="gradient of 'weight' is sparse"):
        fused.step()
    weight.grad = None
    moving = fuse_optimizers([Moving(m.parameters()) for m in models], array)
    with pytest.raises(FusionError, match="member 0, Moving, replaced the memory of 'weight'"):
        moving.step()
