"""Optimizers of members that differ in a submodule, or that share frozen parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_twins import Make, same
from optimizer_factories import LOWERINGS, RULES
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, Rprop

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Differing(nn.Module):
    """Names of `optim_twins.Net`, a frozen layer that is equal in all, and a block that is not."""

    def __init__(self, b: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        torch.manual_seed(b + 1)
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(2))
        self.block = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) if b % 2 else nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.block(nn.functional.linear(self.frozen(x), self.weight, self.bias))


def of_all(make: Callable[..., Optimizer]) -> Make:
    """The optimizer of a table, given the block too, and the frozen layer."""

    def whole(model: Any, b: int) -> Optimizer:
        optimizer = make(model, b)
        listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for more in (model.block, model.frozen):
            if not listed & {id(p) for p in more.parameters()}:
                optimizer.add_param_group({"params": list(more.parameters())})
        return optimizer

    return whole


CASES: dict[str, Make] = {
    **{
        name: of_all(RULES[name])
        for name in ("sgd-momentum", "adam-numbers", "adamw-fused", "nadam", "adagrad-initial")
    },
    "groups": of_all(RULES["adam-groups"]),
    "by themselves": of_all(lambda model, b: Rprop(model.parameters(), lr=0.01 * (b + 1))),
    "of some": of_all(lambda model, b: RULES["adam"](model, b) if b % 2 else Rprop(model.parameters(), lr=0.01)),
}


def twins(make: Make, lowering: Any) -> tuple[ModelArray, FusedOptimizer, list[nn.Module], list[Optimizer]]:
    alone: list[nn.Module] = [Differing(b) for b in range(4)]
    models = copy.deepcopy(alone)
    own = [make(model, b) for b, model in enumerate(models)]
    others = [make(model, b) for b, model in enumerate(alone)]
    array = fuse(models, strict=False)
    return array, fuse_optimizers(own, array, lowering=lowering), alone, others


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_what_a_member_has_alone_is_updated_along(make: Make, lowering: Any) -> None:
    array, fused, alone, others = twins(make, lowering)
    assert {path for path, _, _ in array.shared_parameters()} == {"frozen.weight", "frozen.bias"}
    assert len(list(array.unfused_parameters())) == 2 * 2 + 2 * 4
    for n in range(5):
        for own, other in zip(fused.members, others, strict=True):
            own.param_groups[-1]["lr"] = other.param_groups[-1]["lr"] = 0.1 / (n + 1)
        fused.zero_grad()
        assert all(parameter.grad is None for _, _, parameter in array.unfused_parameters())
        array.map(lambda model: model(X).square().mean()).sum().backward()
        fused.step()
        for model, optimizer in zip(alone, others, strict=True):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        for b, (member, other) in enumerate(zip(array.unfuse(), alone, strict=True)):
            same(member.state_dict(), other.state_dict(), 1e-9, f"weights of {b}")
            same(fused.members[b].state_dict(), others[b].state_dict(), 1e-9, f"state of {b}")


def test_a_member_is_skipped_whole() -> None:
    array, fused, _, _ = twins(CASES["adam-numbers"], None)
    array.map(lambda model: model(X).square().mean()).sum().backward()
    before = [copy.deepcopy(member.state_dict()) for member in array.members]
    fused.step(skip=[1])
    for b, member in enumerate(array.members):
        for name, value in member.state_dict().items():
            still = torch.equal(value, before[b][name])
            assert still == (b == 1 or name.startswith(("frozen", "unused"))), (b, name)


def test_zero_grad_of_what_a_member_has_alone() -> None:
    array, fused, _, _ = twins(CASES["adam-numbers"], None)
    array.map(lambda model: model(X).square().mean()).sum().backward()
    fused.zero_grad(set_to_none=False)
    assert all(parameter.grad.eq(0).all() for _, _, parameter in array.unfused_parameters())


def test_what_a_member_has_alone_is_traced_along() -> None:
    array, fused, _, _ = twins(CASES["adam-numbers"], None)
    traced = fused.traced()
    assert traced is not None
    alone = {id(parameter) for _, _, parameter in array.unfused_parameters()}
    assert alone <= set(map(id, traced.params)) <= set(map(id, array.parameters()))


@pytest.mark.parametrize("path", ["frozen.weight", "block.bias"])
def test_another_members_parameters(path: str) -> None:
    models = [Differing(0), Differing(1).requires_grad_(True), Differing(2)]
    models[1].block = nn.Linear(3, 3, bias=True).double()
    models[0].block = (
        nn.Sequential(nn.Linear(3, 3)).double() if path == "frozen.weight" else nn.Bilinear(3, 3, 3).double()
    )
    for model in models:
        model.frozen.requires_grad_(False)
    array = fuse(models, strict=False)
    optimizers = [Adam([*m.parameters()][:2]) for m in models]
    optimizers[0].add_param_group({"params": [models[1].get_parameter(path)]})
    with pytest.raises(FusionError, match=f"member 0 updates '{path}' of member 1; give the optimizers in the order"):
        fuse_optimizers(optimizers, array)


class OwnZeroGrad(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep the gradients."""


class Modal(torch.optim.SGD):
    def train(self) -> None:
        """Take the weights to train."""

    def eval(self) -> None:
        """Take the weights to validate."""


class WithoutInit(Adam):
    def __init__(self, wrapped: Optimizer) -> None:
        self.param_groups, self.state, self.defaults = wrapped.param_groups, wrapped.state, wrapped.defaults
        self.wrapped = wrapped

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.wrapped.step()


@pytest.mark.parametrize(
    ("kind", "text"), [(OwnZeroGrad, "a `zero_grad` of its own"), (Modal, r"modes \(`train` and `eval`\)")]
)
def test_what_an_array_would_leave_out_is_refused(kind: type[Optimizer], text: str) -> None:
    models = [nn.Linear(2, 1) for _ in range(2)]
    with pytest.raises(FusionError, match=f"the optimizer of member 0, {kind.__name__}, has {text}"):
        fuse_optimizers([kind(model.parameters(), lr=0.1) for model in models], fuse(models))


def test_a_wrapper_without_torchs_hooks_steps_by_itself() -> None:
    models = [nn.Linear(4, 1).double() for _ in range(2)]
    alone = copy.deepcopy(models)
    array = fuse(models)
    optimizer = fuse_optimizers([WithoutInit(Adam(m.parameters(), 0.1 * (b + 1))) for b, m in enumerate(models)], array)
    own = [Adam(m.parameters(), 0.1 * (b + 1)) for b, m in enumerate(alone)]
    for _ in range(3):
        optimizer.zero_grad()
        array.map(lambda model: model(X).square().mean()).sum().backward()
        optimizer.step()
        for model, each in zip(alone, own, strict=True):
            each.zero_grad()
            model(X).square().mean().backward()
            each.step()
    for mine, other in zip(array.unfuse(), alone, strict=True):
        torch.testing.assert_close(mine.weight, other.weight, rtol=1e-9, atol=1e-12)
