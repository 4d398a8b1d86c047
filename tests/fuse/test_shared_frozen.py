"""Frozen parameters whose memory models of several arrays share, and freezing and unfreezing of parameters."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twins import build, close, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import concat, fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Adapted(nn.Module):
    """A frozen linear layer that is equal in all, and a product of rank 2 beside it."""

    def __init__(self, b: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        torch.manual_seed(b + 1)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def train(array: ModelArray) -> None:
    optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in array.members], array)
    array(X).square().sum().backward()
    optimizer.step()


def selected(models: list[nn.Module]) -> ModelArray:
    return fuse(models).select([0])


def fused_again(models: list[nn.Module]) -> ModelArray:
    fuse(models)
    return fuse(models[:1])


def selected_twice(models: list[nn.Module]) -> ModelArray:
    return fuse(models).select([2, 0]).select([1])


def joined(models: list[nn.Module]) -> ModelArray:
    return concat([fuse(models).select([0])])


def of_two(models: list[nn.Module]) -> ModelArray:
    return fuse(models).select([0, 1])


ALONE = (selected, fused_again, selected_twice, joined, of_two)


def unfreeze_members(array: ModelArray) -> None:
    for member in array.members:
        member.requires_grad_(True)
    array(X)


def unfreeze_array(array: ModelArray) -> None:
    array.requires_grad_(True)


@pytest.mark.parametrize("unfreeze", [unfreeze_members, unfreeze_array])
@pytest.mark.parametrize("part", ALONE)
def test_what_others_use_is_not_unfrozen(
    part: Callable[[list[nn.Module]], ModelArray], unfreeze: Callable[[ModelArray], None]
) -> None:
    models: list[nn.Module] = [Adapted(b) for b in range(4)]
    twins = copy.deepcopy(models)
    array = part(models)
    rest = fuse(models[2:] if len(array) == 2 else models[1:])
    assert [path for path, _, _ in array.shared_parameters()] == ["base.weight", "base.bias"]
    train(array)
    with pytest.raises(FusionError, match=r"'base.weight' was frozen .* and is kept once .*copy.deepcopy"):
        unfreeze(array)
    compare(rest(X), [twin(X) for twin in twins[-len(rest) :]])


@pytest.mark.parametrize("part", ALONE)
def test_members_fused_after_unfreezing_have_memory_of_their_own(part: Callable[..., ModelArray]) -> None:
    models: list[nn.Module] = [Adapted(b) for b in range(4)]
    twins = copy.deepcopy(models)
    array = part(models)
    rest = fuse(models[len(array) :])
    for member in array.members:
        member.requires_grad_(True)
    again = fuse(array.members)
    train(again)
    compare(rest(X), [twin(X) for twin in twins[len(array) :]])
    for b, member in enumerate(again.members):
        twin = twins[b].requires_grad_(True)
        twin(X).square().sum().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        for key, value in twin.state_dict().items():
            close(member.state_dict()[key], value, f"{key} of {b}")


def test_a_copy_of_a_lone_member_may_be_unfrozen() -> None:
    models = [Adapted(b) for b in range(2)]
    array = fuse(copy.deepcopy(fuse(models).select([0]).unfuse()))
    array.requires_grad_(True)
    train(array)
    close(models[1].base.weight, models[0].base.weight, "base")


def test_what_runs_apart_has_memory_of_its_own() -> None:
    models = [nn.Sequential(nn.Sequential(nn.Linear(4, 4), *more)).double() for more in ((), (nn.Tanh(),))]
    for model in models:
        nn.init.eye_(model[0][0].weight)
        nn.init.ones_(model[0][0].bias)
        model.requires_grad_(False)
    array = fuse(iter(models), strict=False)
    twin = copy.deepcopy(models[1])
    models[0].requires_grad_(True)
    array(X)[0].square().sum().backward()
    torch.optim.SGD(models[0].parameters(), lr=0.1).step()
    close(models[1](X), twin(X), "output of 1")


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("strict", [True, False])
def test_freezing_an_array_freezes_its_members(members: int, strict: bool) -> None:
    models = build(make, members)
    if not strict and members > 1:
        models[1][1] = nn.PReLU().double()
    twins = copy.deepcopy(models)
    array = fuse(models, strict=strict)
    assert array.requires_grad_(False) is array
    assert not any(p.requires_grad for model in (array, *models) for p in model.parameters())
    assert not array(X).requires_grad
    array.requires_grad_(True)
    assert all(p.requires_grad for model in (array, *models) for p in model.parameters())
    train(array)
    for b, (model, twin) in enumerate(zip(models, twins, strict=True)):
        twin(X).square().sum().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        for key, value in twin.state_dict().items():
            close(model.state_dict()[key], value, f"{key} of {b}")
