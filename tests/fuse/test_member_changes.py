"""Changes of models and optimizers after fusion are synchronised or refused, and never ignored."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer
from twins import build, close

from shoal.core.errors import FusionError
from shoal.fuse.api import concat, fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.grads import clip_grad_norm_
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.scaler import GradScaler

MEMBERS = 3
X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


def two_groups(model: nn.Module) -> Optimizer:
    parts: Any = model
    return torch.optim.Adam(
        [{"params": parts[0].parameters(), "lr": 0.1}, {"params": parts[2].parameters(), "lr": 0.01}]
    )


def some(model: nn.Module) -> Optimizer:
    parts: Any = model
    return torch.optim.SGD(parts[0].parameters(), lr=0.1)


def fused(make: Callable[[nn.Module], Optimizer] = two_groups) -> tuple[ModelArray, FusedOptimizer]:
    models = build(net, MEMBERS)
    array = fuse(models)
    return array, fuse_optimizers([make(model) for model in models], array)


def train(array: ModelArray, optimizer: FusedOptimizer) -> None:
    optimizer.zero_grad()
    array.map(loss, X).sum().backward()
    optimizer.step()


Change = Callable[[Any, Optimizer], None]


def clear(model: Any, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def drop(model: Any, optimizer: Optimizer) -> None:
    del optimizer.state[model[0].weight]


def swap(model: Any, optimizer: Optimizer) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]


def add(model: Any, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": list(model[2].parameters())})


@pytest.mark.parametrize("which", [range(MEMBERS), [1]], ids=["all", "one"])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(two_groups, clear, id="state cleared"),
        pytest.param(two_groups, drop, id="state of one parameter dropped"),
        pytest.param(two_groups, swap, id="parameters moved between groups"),
        pytest.param(some, add, id="a group added, whose gradients are dropped"),
    ],
)
def test_followed(make: Callable[[nn.Module], Optimizer], change: Change, which: range | list[int]) -> None:
    array, optimizer = fused(make)
    twins = build(net, MEMBERS)
    alone = [make(twin) for twin in twins]
    for step in range(4):
        if step == 2:
            for b in which:
                change(array.members[b], optimizer.members[b])
                change(twins[b], alone[b])
        train(array, optimizer)
        for twin, own in zip(twins, alone, strict=True):
            own.zero_grad()
            loss(twin, X).backward()
            own.step()
    for b, twin in enumerate(twins):
        for (name, mine), its in zip(array.members[b].named_parameters(), twin.parameters(), strict=True):
            close(mine.detach(), its.detach(), f"{name} of {b}")


def freeze(model: Any) -> None:
    model[0].weight.requires_grad_(False)


def replace_module(model: Any) -> None:
    model[1] = nn.ReLU()


def replace_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))


def assign(model: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def data(model: Any) -> None:
    model[0].weight.data = torch.zeros(4, 3, dtype=torch.float64)


REFUSED = {
    "frozen": (freeze, "'0.weight' is frozen in members .1. and not in the others"),
    "module": (replace_module, "member 1: the module '1' has been replaced"),
    "parameter": (replace_parameter, "member 1: '0.weight' has been replaced"),
    "assign": (assign, "member 1: '0.weight' has been replaced"),
    "data": (data, "member 1: '0.weight' has been given other memory"),
    "type": (lambda model: model.float(), "member 1: '0.weight' has been given other memory"),
    "prune": (lambda model: prune.l1_unstructured(model[0], "weight", 0.5), "member 1: '0.weight' has been replaced"),
    "hook": (lambda model: model[0].register_forward_hook(lambda *_: None), "member 1: a hook has been registered"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_of_one_member_refused_within_as_many_runs(change: Callable[[Any], None], message: str) -> None:
    array, _ = fused()
    array.map(loss, X)
    change(array.members[1])

    def runs() -> None:
        for _ in range(MEMBERS):
            array.map(loss, X)

    with pytest.raises(FusionError, match=message):
        runs()


GONE = {
    "map": lambda array, optimizer: array.map(loss, X),
    "step": lambda array, optimizer: optimizer.step(),
    "zero_grad": lambda array, optimizer: optimizer.zero_grad(),
    "clip": lambda array, optimizer: clip_grad_norm_(array, 1.0),
    "scaler": lambda array, optimizer: GradScaler(array),
    "select": lambda array, optimizer: array.select([0]),
    "concat": lambda array, optimizer: concat([array]),
    "fuse_optimizers": lambda array, optimizer: fuse_optimizers(optimizer.members, array),
}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("leave", ["select", "fuse", "concat"])
@pytest.mark.parametrize("use", GONE.values(), ids=GONE)
def test_what_members_have_left_is_of_no_use(leave: str, use: Callable[[Any, Any], Any]) -> None:
    array, optimizer = fused()
    train(array, optimizer)
    left = {
        "select": lambda: array.select([0, 2]),
        "fuse": lambda: fuse(array.unfuse()),
        "concat": lambda: concat([array]),
    }
    survivors = left[leave]()
    with pytest.raises(FusionError, match=r"have left this array .* `fuse_optimizers` makes for that array"):
        use(array, optimizer)
    again = fuse_optimizers([optimizer.members[b] for b in ([0, 2] if leave == "select" else range(3))], survivors)
    train(survivors, again)


def test_a_state_dict_is_copied_not_assigned() -> None:
    array, _ = fused()
    before = array.state_dict()
    with pytest.raises(FusionError, match="assign=False"):
        array.load_state_dict({name: tensor * 0 for name, tensor in before.items()}, assign=True)
    array.load_state_dict({name: tensor * 0 for name, tensor in before.items()})
    assert not any(parameter.any() for member in array.members for parameter in member.parameters())


def buffer(model: nn.Module, x: Tensor) -> Tensor:
    model.register_buffer("seen", model(x).detach().sum())
    return loss(model, x)


def parameter(model: nn.Module, x: Tensor) -> Tensor:
    model.register_parameter("seen", nn.Parameter(model(x).detach().sum()))
    return loss(model, x)


@pytest.mark.parametrize("register", [buffer, parameter])
def test_what_a_function_registers_is_refused(register: Callable[..., Tensor]) -> None:
    array, _ = fused()
    with pytest.raises(FusionError, match=r"it registers or deletes \['seen'\] .*array\.unfuse\(\)"):
        array.map(register, X)
    assert not any(hasattr(member, "seen") for member in array.members)
    assert array.map(loss, X).shape == (MEMBERS,)


def test_what_a_function_deletes_is_refused() -> None:
    models = build(lambda: nn.BatchNorm1d(3), MEMBERS)

    def delete(model: Any, x: Tensor) -> Tensor:
        del model.running_var
        return x.sum()

    array = fuse(models)
    with pytest.raises(FusionError, match=r"it registers or deletes \['running_var'\]"):
        array.map(delete, X)
    assert array(X).shape == (MEMBERS, 5, 3)


def test_attribute_that_a_run_changed_and_that_is_set_back() -> None:
    def count(model: Any, x: Tensor) -> Tensor:
        model.calls += 1
        value: Tensor = model(x).square().mean() * model.calls
        return value

    models: list[Any] = build(net, MEMBERS)
    for model in models:
        model.calls = 0
    array = fuse(models)
    first = array.map(count, X)
    for member in array.members:
        member.calls = 0  # type: ignore[assignment]
    torch.testing.assert_close(array.map(count, X), first)
    assert [member.calls for member in array.members] == [1] * MEMBERS
