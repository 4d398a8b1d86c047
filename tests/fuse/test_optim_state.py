"""Optimizer state can be moved between an array and plain torch, in both directions, at any time."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_twins import Make, Net, Twins, same
from optimizer_factories import RULES
from torch.optim import SGD, Adam, AdamW

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers

MAKES: dict[str, Make] = {
    "sgd": lambda model, b: SGD(model.parameters(), lr=0.1 + b, momentum=0.9, dampening=0.1 * b),
    "adam": lambda model, b: Adam(model.parameters(), lr=0.1 + b, amsgrad=True),
    "adamw": lambda model, b: AdamW(model.parameters(), lr=0.1 + b, fused=True),
    **{name: RULES[name] for name in ("adamax", "nadam", "radam", "adagrad-initial", "adadelta")},
    **{name: RULES[name] for name in ("rmsprop-momentum", "rmsprop-centered")},
}
cases = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
both_cases = pytest.mark.parametrize(
    ("make", "lowering"),
    [
        pytest.param(make, way, id=f"{name}-{way}", marks=[pytest.mark.thorough] if (i + j) % 2 else [])
        for i, (name, make) in enumerate(MAKES.items())
        for j, way in enumerate(["kernels", "elementwise"])
    ],
)


@pytest.fixture
def wide() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def wide_product(request: pytest.FixtureRequest) -> None:
    """NAdam keeps a product in the default type until a state is loaded, and from then on in the parameters' type."""
    if request.node.callspec.params["make"] is RULES["nadam"]:
        request.getfixturevalue("wide")


@both_cases
@pytest.mark.usefixtures("wide_product")
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


@both_cases
@pytest.mark.usefixtures("wide_product")
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


@both_cases
@pytest.mark.usefixtures("wide_product")
def test_a_checkpoint_is_loaded_into_a_member(make: Make, lowering: Any) -> None:
    twins = Twins(make, 3, lowering=lowering)
    twins.step(2)
    saved = copy.deepcopy(twins.optimizers[2].state_dict())
    twins.step(3)
    for side in (twins.own, twins.optimizers):
        side[0].load_state_dict(saved)
    twins.step(2)
    twins.check()


@both_cases
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


@pytest.mark.usefixtures("wide")
def test_precision_of_a_float64_default() -> None:
    twins = Twins(lambda model, b: Adam(model.parameters(), lr=0.1 + b), 2)
    twins.step(3)
    twins.check()
    assert twins.own[0].state[twins.array.members[0].weight]["step"].dtype == torch.float64


@cases
def test_state_of_torch_keeps_its_form(make: Make) -> None:
    """Names, their order, types and shapes; and what it holds before the first step."""
    twins = Twins(make, 2)
    twins.check()
    twins.step(1)
    for own, other in zip(twins.own, twins.optimizers, strict=True):
        mine, its = own.state_dict()["state"], other.state_dict()["state"]
        assert mine.keys() == its.keys()
        for key in its:
            assert [(n, t.shape, t.dtype) for n, t in mine[key].items()] == [
                (n, t.shape, t.dtype) for n, t in its[key].items()
            ]


@pytest.mark.parametrize("keep", [[0, 1, 2, 3], [1, 2], [3]], ids=str)
@pytest.mark.parametrize("make", [MAKES["adam"], MAKES["rmsprop-centered"]])
def test_neighbours_are_fused_again_without_a_copy(make: Make, keep: list[int]) -> None:
    twins = Twins(make, 4)
    twins.step(2)
    models = [twins.array.members[b] for b in keep]
    optimizers = [twins.own[b] for b in keep]

    def places() -> list[int]:
        states = [state for own, model in zip(optimizers, models, strict=True) for state in [own.state[model.weight]]]
        return [tensor.data_ptr() for state in states for tensor in state.values()]

    before = places()
    array = twins.array.select(keep)
    fused = fuse_optimizers(optimizers, array)
    for param in array.parameters():
        param.grad = torch.ones_like(param)
    fused.step()
    assert places() == before


@cases
def test_a_group_of_its_own_is_begun_later(make: Make) -> None:
    """A parameter that joins when the others have a state already begins as in torch."""
    if not _begins_in_torch(make):
        pytest.skip("this torch's own optimizer has no state for it")
    twins = Twins(lambda model, b: _narrowed(make(model, b)), 3)
    twins.step(2)
    for optimizers, models in ((twins.own, twins.array.members), (twins.optimizers, twins.alone)):
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.add_param_group({"params": [model.scale]})
    twins.step(2)
    twins.check()


def _begins_in_torch(make: Make) -> bool:
    """Before 2.12, Adagrad makes all state in its constructor."""
    model = Net(torch.float64)
    optimizer = _narrowed(make(model, 0))
    optimizer.add_param_group({"params": [model.scale]})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def _narrowed(optimizer: Any) -> Any:
    """The optimizer without the parameter `scale`, the only one without axes."""
    (group,) = optimizer.param_groups
    for param in [p for p in group["params"] if p.dim() == 0]:
        optimizer.state.pop(param, None)
    group["params"] = [p for p in group["params"] if p.dim() > 0]
    return optimizer


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
