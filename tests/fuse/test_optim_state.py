"""State moves between an array and plain torch, both ways, at any time."""

import copy
from typing import Any

import pytest
import torch
from optim_twins import Make, Net, Twins, same
from torch.optim import SGD, Adam, AdamW

from shoal.fuse.array import fuse
from shoal.fuse.optim.fused import fuse_optimizers

MAKES: dict[str, Make] = {
    "sgd": lambda model, b: SGD(model.parameters(), lr=0.1 + b, momentum=0.9, dampening=0.1 * b),
    "adam": lambda model, b: Adam(model.parameters(), lr=0.1 + b, amsgrad=True),
    "adamw": lambda model, b: AdamW(model.parameters(), lr=0.1 + b, fused=True),
}
cases = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
lowerings = pytest.mark.parametrize("lowering", ["kernels", "elementwise"])


@cases
@lowerings
def test_a_member_goes_on_alone(make: Make, lowering: Any) -> None:
    twins = Twins(make, 3, lowering=lowering)
    twins.step(3)
    model = Net()
    model.load_state_dict(twins.array.unfuse()[1].state_dict())
    optimizer = make(model, 1)
    optimizer.load_state_dict(copy.deepcopy(twins.fused.unfuse()[1].state_dict()))
    for _ in range(3):
        twins.give_grads()
        for path, param in model.named_parameters():
            grad = twins.alone[1].get_parameter(path).grad
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        twins.optimizers[1].step()
    same(model.state_dict(), twins.alone[1].state_dict(), 1e-9, "weights")
    same(optimizer.state_dict(), twins.optimizers[1].state_dict(), 1e-9, "state")


@cases
@lowerings
def test_members_of_different_age_are_fused(make: Make, lowering: Any) -> None:
    """Member b has made b steps, member 0 none; `bias` joins later than `weight`."""
    twins = Twins(make, 3, lowering=lowering)
    members = twins.array.unfuse()
    for b in range(3):
        for _ in range(b):
            twins.give_grads(["unused", "bias"])
            for model, optimizer in ((members[b], twins.own[b]), (twins.alone[b], twins.optimizers[b])):
                for path in ("weight", "scale"):
                    model.get_parameter(path).grad = twins.alone[b].get_parameter(path).grad.clone()
                optimizer.step()
                optimizer.zero_grad()
    twins.fuse(members)
    twins.check()
    twins.step(4)
    twins.check()


@cases
@lowerings
def test_a_checkpoint_is_loaded_into_a_member(make: Make, lowering: Any) -> None:
    twins = Twins(make, 3, lowering=lowering)
    twins.step(2)
    saved = copy.deepcopy(twins.optimizers[2].state_dict())
    twins.step(3)
    for side in (twins.own, twins.optimizers):
        side[0].load_state_dict(saved)
    twins.step(2)
    twins.check()


@cases
@lowerings
def test_survivors_are_fused_again(make: Make, lowering: Any) -> None:
    twins = Twins(make, 5, lowering=lowering)
    twins.step(3)
    keep = [3, 0]
    twins.array = twins.array.select(keep)
    twins.own = [twins.own[b] for b in keep]
    twins.alone = [twins.alone[b] for b in keep]
    twins.optimizers = [twins.optimizers[b] for b in keep]
    twins.fused = fuse_optimizers(twins.own, twins.array, lowering=lowering)
    twins.step(3)
    twins.check()


def test_state_is_made_of_views() -> None:
    twins = Twins(MAKES["adam"], 2)
    twins.step(1)
    held = twins.own[0].state[twins.array.members[0].weight]
    before = {key: value.clone() for key, value in held.items()}
    twins.step(1)
    assert held["step"] == before["step"] + 1
    assert held["step"].dim() == 0
    assert not torch.equal(held["exp_avg"], before["exp_avg"])


def test_state_before_a_first_gradient() -> None:
    twins = Twins(MAKES["adam"], 2)
    assert not twins.own[0].state
    twins.step(1)
    assert len(twins.own[0].state) == 3
    assert all(
        own.state.keys() == {p for p in model.parameters() if p is not model.unused}
        for own, model in zip(twins.own, twins.array.members, strict=True)
    )


def test_precision_of_a_float64_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        twins = Twins(lambda model, b: Adam(model.parameters(), lr=0.1 + b), 2)
        twins.step(3)
        twins.check()
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_array_changes_its_dtype() -> None:
    torch.manual_seed(0)
    models = [Net(torch.float32) for _ in range(2)]
    optimizers = [Adam(model.parameters(), lr=0.1) for model in models]
    array = fuse(models)
    fused = fuse_optimizers(optimizers, array)
    for dtype in (torch.float32, torch.float64):
        array.to(dtype)
        for param in array.parameters():
            param.grad = torch.ones_like(param)
        before = [model.weight.detach().clone() for model in models]
        fused.step()
        for model, old in zip(models, before, strict=True):
            torch.testing.assert_close(model.weight, old - 0.1)
            assert optimizers[0].state[models[0].weight]["exp_avg"].dtype == dtype
