"""Fused optimizers: each member is updated as by its own optimizer."""

from typing import Any

import pytest
import torch
from optim_twins import Make, Net, Twins, same
from optimizer_factories import LOWERINGS, OTHERS, RULES
from torch import nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.param_group_batch import ParamGroupBatch
from shoal.fuse.optim.unfused_step import MemberLoop


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("make", [*RULES.values(), *OTHERS.values()], ids=[*RULES, *OTHERS])
def test_equals_the_members_own_optimizers(make: Make, lowering: Any) -> None:
    for members in (1, 3):
        twins = Twins(make, members, lowering=lowering)
        twins.step(7)
        twins.check()


ON_A_GPU = {name: make for name, make in {**RULES, **OTHERS}.items() if name != "adagrad-fused"}
"""Torch has no fused kernel of Adagrad for CUDA."""


@pytest.mark.gpu
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("make", ON_A_GPU.values(), ids=ON_A_GPU)
def test_equals_the_members_own_optimizers_on_a_gpu(make: Make, lowering: Any) -> None:
    twins = Twins(make, 4, lowering=lowering, device="cuda")
    twins.step(5)
    twins.check()


def test_rules_run_all_members_together() -> None:
    for name, make in RULES.items():
        twins = Twins(make, 2)
        assert all(isinstance(unit, ParamGroupBatch) for unit in twins.fused._units), name
        assert len(twins.fused._units) == len(twins.own[0].param_groups), name


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("make", [RULES["sgd-dampening"], RULES["adam"]], ids=["sgd", "adam"])
def test_a_parameter_without_gradient_is_skipped(make: Make, lowering: Any) -> None:
    twins = Twins(make, 3, lowering=lowering)
    for skip in (["unused", "bias"], ["unused", "weight"], ["unused", "weight", "bias", "scale"], ["unused"]):
        twins.step(2, skip)
        twins.check()


@pytest.mark.in_turns
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


def test_what_stands_in_the_place_of_step_is_called() -> None:
    twins = Twins(RULES["sgd-momentum"], 3)
    twins.step(1)
    calls: list[Optimizer] = []
    for optimizers in (twins.own, twins.optimizers):
        step = optimizers[1].step

        def halved(closure: None = None, optimizer: Optimizer = optimizers[1], step: Any = step) -> None:
            calls.append(optimizer)
            for parameter in optimizer.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            step()

        optimizers[1].step = halved  # type: ignore[method-assign]
    twins.step(2)
    twins.check()
    assert calls.count(twins.own[1]) == 2


def test_what_a_scheduler_puts_in_the_place_of_step_is_not_a_reason_to_step_alone() -> None:
    models = [Net() for _ in range(2)]
    optimizers = [Adam(m.parameters()) for m in models]
    for optimizer in optimizers:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not any(isinstance(unit, MemberLoop) for unit in fuse_optimizers(optimizers, fuse(models))._units)


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
    with pytest.raises(FusionError, match=r"member 2 updates a tensor that is not a parameter of its model .*group 0"):
        fuse_optimizers([*optimizers[:2], SGD(Net().parameters(), lr=0.1)], array)
    with pytest.raises(FusionError, match="member 0, LBFGS, needs a closure"):
        fuse_optimizers([torch.optim.LBFGS(m.parameters()) for m in models], array)
    with pytest.raises(FusionError, match="member 0, SparseAdam, needs sparse gradients"):
        fuse_optimizers([SparseAdam(m.parameters()) for m in models], array)
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
