"""Side effects of a function: they are those of one call for each member; a first call that fails has none."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twins import build, close, compare, compare_state

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse, stack
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep
from shoal.fuse.torch_functions import written_arguments

MEMBERS = 3
X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
Effect = Callable[[nn.Module, Tensor], Any]


class Model(nn.Module):
    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
        self.outer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.calls = 0
        self.history: list[Any] = []
        self.shapes: list[Any] = []
        self.seen: dict[str, Any] = {}
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


class Meter:
    total: Any = 0.0


@dataclass
class Output:
    loss: Any
    rows: int = 5


def loss_of(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().mean()


def needs_member(m: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(m, x).detach()
    return loss * loss.item()


REFUSED = (
    r"needs_member \(test_map_effects\.py:\d+\): a plain value is asked for, .*; compute with tensors, not with "
    r"numbers \(no `\.item\(\)`\), or run it on the members, .*: \[.* for model in array\.unfuse\(\)\]"
)


def backward(m: nn.Module, x: Tensor) -> None:
    loss_of(m, x).backward()


def backward_of_several(m: nn.Module, x: Tensor) -> None:
    torch.autograd.backward([loss_of(m, x), m(x).sum()], [torch.tensor(2.0, dtype=torch.float64), None])


def clip(m: nn.Module, x: Tensor) -> None:
    backward(m, x)
    nn.utils.clip_grad_norm_(m.parameters(), 0.1)


def assign_gradients(m: nn.Module, x: Tensor) -> None:
    for p in m.parameters():
        p.grad = torch.ones_like(p) if p.grad is None else p.grad + 1


def scale_gradients(m: nn.Module, x: Tensor) -> None:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.mul_(3)


def zero_gradients(m: nn.Module, x: Tensor) -> None:
    m.zero_grad(set_to_none=False)
    backward(m, x)


@torch.no_grad()
def write(m: nn.Module, x: Tensor) -> None:
    m.outer.weight.add_(1)
    m.outer.bias[0] += 1
    m.inner[0].weight.data.mul_(2)
    nn.init.constant_(m.inner[0].bias, 3.0)
    m.inner[0].bias.copy_(m.inner[0].bias * 3)


def write_view(m: nn.Module, x: Tensor) -> None:
    row = m.outer.weight[0]
    with torch.no_grad():
        row.mul_(2)


def replace_data(m: nn.Module, x: Tensor) -> None:
    m.outer.weight.data = m.outer.weight.data * 2


def optimize(kind: Callable[..., torch.optim.Optimizer], m: nn.Module, x: Tensor) -> None:
    optimizer = kind(m.parameters())
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        backward(m, x)
        optimizer.step()


EFFECTS: dict[str, Effect] = {
    "backward": backward,
    "backward of several": backward_of_several,
    "clip": clip,
    "assign gradients": assign_gradients,
    "scale gradients": scale_gradients,
    "zero gradients": zero_gradients,
    "write": write,
    "write a view": write_view,
    "replace data": replace_data,
    "SGD within": partial(optimize, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "Adam within": partial(optimize, torch.optim.Adam),
}


def with_gradients(models: list[nn.Module]) -> None:
    for model in models:
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)


def arrays(members: int = MEMBERS, gradients: bool = False) -> tuple[ModelArray, list[nn.Module]]:
    """An array and the twins of its members."""
    array, twins = fuse(build(Model, members)), build(Model, members)
    if gradients:
        with_gradients(twins)
        for _, stacked, _ in array.stacked_tensors():
            if isinstance(stacked, nn.Parameter):
                stacked.grad = torch.full_like(stacked, 0.5)
    return array, twins


@pytest.mark.pairwise
@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients before", "gradients before"])
@pytest.mark.parametrize("refused", [False, True], ids=["at once", "refused"])
@pytest.mark.parametrize("members", [1, MEMBERS])
@pytest.mark.parametrize("name", EFFECTS)
def test_effects_on_parameters(name: str, members: int, refused: bool, gradients: bool) -> None:
    def fn(m: nn.Module, x: Tensor) -> Tensor:
        EFFECTS[name](m, x)
        return needs_member(m, x) if refused else loss_of(m, x).detach()

    array, twins = arrays(members, gradients)
    for _ in range(2):
        if refused and members > 1:
            with pytest.raises(FusionError, match=REFUSED):
                array.map(fn, X)
        else:
            compare(array.map(fn, X), [fn(twin, X) for twin in twins])
    compare_state(array, twins)
    for member, twin in zip(array.unfuse(), twins, strict=True):
        for (path, own), expected in zip(member.named_parameters(), twin.parameters(), strict=True):
            close(own, expected, path)


def test_effects_where_members_differ() -> None:
    def fn(m: nn.Module, x: Tensor) -> Tensor:
        backward(m, x)
        with torch.no_grad():
            m.outer.weight.mul_(1.5)
        return needs_member(m, x)

    def models() -> list[nn.Module]:
        return [build(partial(Model, depth), 1)[0] for depth in (1, 2)]

    array, twins = fuse(models(), strict=False), models()
    with pytest.raises(FusionError, match=REFUSED):
        array.map(fn, X)
    assert all(own.grad is None for own in array.parameters())
    for member, twin in zip(array.unfuse(), twins, strict=True):
        for path, value in twin.state_dict().items():
            assert torch.equal(member.state_dict()[path], value), path


def test_what_shows_in_a_later_call_is_not_rolled_back() -> None:
    def fn(m: nn.Module, x: Tensor, part: bool) -> Tensor:
        with torch.no_grad():
            m.mean += 1
        return needs_member(m, x) if part else loss_of(m, x).detach()

    array, twins = arrays()
    for _ in range(2):
        compare(array.map(fn, X, False), [fn(twin, X, False) for twin in twins])
    with pytest.raises(
        FusionError,
        match=r"a plain value .*, in a later call than the first, whose effects are not rolled back",
    ):
        array.map(fn, X, True)
    close(array.stacked.mean, torch.stack([twin.mean + 1 for twin in twins]), "mean")


def test_attributes_are_as_before_each_attempt() -> None:
    def fn(m: nn.Module, x: Tensor) -> Tensor:
        m.calls += 1
        m.mean.add_(m(x).mean(0).detach())  # at first shown as one for all, being equal
        return m(x).sum() + m.calls

    def models() -> list[nn.Module]:
        made = build(Model, MEMBERS)
        for model in made:
            model.mean.zero_()
        return made

    array, twins = fuse(models()), models()
    compare(array.map(fn, X), [fn(twin, X) for twin in twins])
    assert [member.calls for member in array.unfuse()] == [1] * MEMBERS
    compare_state(array, twins)


def test_copies_nothing_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(m: nn.Module, x: Tensor) -> None:
        nn.functional.relu(m(x), inplace=True).sum().backward()

    array, _ = arrays()
    array.map(fn, X)
    copied = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda x, **kwargs: copied.append(x.shape) or clone(x, **kwargs))
    array.map(fn, X)
    assert copied == []


def test_init_writes_its_argument() -> None:
    assert written_arguments(nn.init.constant_, (), {"tensor": X, "val": 1.0}) == [X]


@pytest.mark.parametrize("members", [1, MEMBERS])
@pytest.mark.parametrize("whose", ["array's", "member's", "member's step"])
def test_optimizers_from_outside_are_refused(whose: str, members: int) -> None:
    models = build(Model, members)
    own = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    array = fuse(models)
    fused = fuse_optimizers(own, array)

    def fn(m: nn.Module, x: Tensor) -> Tensor:
        if whose != "member's step":
            (fused if whose == "array's" else own[0]).zero_grad()
        loss = loss_of(m, x)
        own[0].step()
        return loss

    with pytest.raises(FusionError, match="outside of `map`, or use `TrainingStep`"):
        array.map(fn, X)


@pytest.mark.parametrize("outer", [1, MEMBERS])
@pytest.mark.parametrize("way", ["call", "map", "of its output"])
def test_an_array_within_another_is_refused(way: str, outer: int) -> None:
    array, other = fuse(build(Model, outer)), fuse(build(partial(nn.Linear, 4, 4), MEMBERS))
    ways: dict[str, Effect] = {
        "call": lambda m, x: m(other(x)),
        "map": lambda m, x: m(x) + other.map(lambda k, y: k(y).sum(), x),
        "of its output": lambda m, x: other(m(x)),
    }
    with pytest.raises(FusionError, match="call it before that"):
        array.map(ways[way], X)
    if outer == MEMBERS:
        assert array(stack(other(X))).shape == (MEMBERS, 5, 2)


RESULTS: dict[str, Effect] = {
    "string": lambda m, x: "high",
    "numpy": lambda m, x: m(x).detach().numpy(),
    "dataclass": lambda m, x: Output(loss_of(m, x)),
    "set": lambda m, x: {m(x).detach().sum().item()},
    "nested": lambda m, x: {"loss": Output(loss_of(m, x)), "name": ["a", {"b"}]},
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_without_an_axis_of_members_are_refused(name: str) -> None:
    array, _ = arrays()
    with pytest.raises(FusionError, match=r"array\.unfuse\(\)"):
        array.map(RESULTS[name], X)


def test_numbers_of_any_kind_are_stacked() -> None:
    array, _ = arrays()
    result = array.map(lambda m, x: (np.float32(1.5), np.int64(2), np.bool_(True), 1j, None), X)
    assert [None if leaf is None else leaf.tolist() for leaf in result] == [
        *([value] * MEMBERS for value in (1.5, 2, True, 1j)),
        None,
    ]


losses: list[Any] = []


class Task:
    def __init__(self) -> None:
        self.history: list[Any] = []

    def loss(self, m: nn.Module, x: Tensor) -> Tensor:
        self.history.append(loss_of(m, x).detach())
        return loss_of(m, x)


def _append_globally(m: nn.Module, x: Tensor) -> Tensor:
    losses.append(loss_of(m, x).detach())
    return loss_of(m, x)


def _append_to_own(m: nn.Module, x: Tensor) -> Tensor:
    m.history.append(loss_of(m, x).detach())
    m.shapes.append(tuple(x.shape))
    m.seen["last"] = m.history[-1]
    m.meter.total = m.meter.total + m.history[-1]
    return loss_of(m, x)


def same(found: list[Any], expected: list[Any]) -> None:
    assert [type(value) for value in found] == [Tensor] * len(expected)
    for i, (value, other) in enumerate(zip(found, expected, strict=True)):
        close(value, other, f"entry {i}")


@pytest.mark.parametrize("modes", [("plain",), ("eager", "plain")], ids="-".join)
def test_lists_in_attributes_are_each_members(modes: Any) -> None:
    models, twins = build(Model, MEMBERS), build(Model, MEMBERS)
    array = fuse(models)
    optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in models], array)
    step = TrainingStep(array, optimizer, _append_to_own, modes=modes)
    for _ in range(4):
        step(X)
    for member, twin in zip(array.unfuse(), twins, strict=True):
        own = torch.optim.SGD(twin.parameters(), lr=0.1)
        expected = []
        for _ in range(4):
            own.zero_grad()
            loss_of(twin, X).backward()
            expected.append(loss_of(twin, X).detach())
            own.step()
        same(member.history, expected)
        assert len(member.shapes) == len(member.history)
        same([member.seen["last"], member.meter.total], [expected[-1], sum(expected)])


@pytest.mark.parametrize("kind", ["closure", "nonlocal", "argument", "method", "global"])
def test_a_tensor_put_into_what_a_function_names_is_refused(kind: str) -> None:
    captured: list[Any] = []
    total: Any = 0.0
    task = Task()
    losses.clear()

    def closure(m: nn.Module, x: Tensor) -> Tensor:
        captured.append(loss_of(m, x).detach())
        return loss_of(m, x)

    def adding(m: nn.Module, x: Tensor) -> Tensor:
        nonlocal total
        total = total + loss_of(m, x).detach()
        return loss_of(m, x)

    def given(into: dict[str, list[Any]], m: nn.Module, x: Tensor) -> Tensor:
        into["losses"].append(loss_of(m, x).detach())
        return loss_of(m, x)

    into: dict[str, list[Any]] = {"losses": []}
    fns = {
        "closure": (closure, r"captured\[0\]"),
        "nonlocal": (adding, "total"),
        "argument": (partial(given, into), r"losses\[0\]"),
        "method": (task.loss, r"Task.history\[0\]"),
        "global": (_append_globally, r"losses\[0\]"),
    }
    fn, where = fns[kind]
    array, _ = arrays()
    with pytest.raises(FusionError, match=rf"it puts a tensor into `{where}`, where each member has its own"):
        array.map(fn, X)
    assert (captured, total, into["losses"], task.history, losses) == ([], 0.0, [], [], [])


def test_shapes_in_the_models_lists_part_the_members() -> None:
    array, _ = arrays()
    array.map(lambda m, x: m.shapes.append(tuple(x.shape)), X)
    assert [member.shapes for member in array.unfuse()] == [[(5, 4)]] * MEMBERS


def test_constants_that_are_kept_do_not_part_the_members() -> None:
    table: dict[int, Tensor] = {}
    rows: list[int] = []
    array, twins = arrays()

    def fn(m: nn.Module, x: Tensor) -> Tensor:
        mask = table.setdefault(len(x), torch.ones(len(x), 1, dtype=x.dtype))
        m.seen[len(x)] = mask
        rows.append(len(x))
        return (m(x) * mask).sum()

    compare(array.map(fn, X), [fn(twin, X) for twin in copy.deepcopy(twins)])


def test_a_function_that_keeps_state_is_not_captured() -> None:
    calls = {"made": 0}

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        calls["made"] += 1
        return loss_of(m, x)

    models = build(Model, MEMBERS)
    array = fuse(models)
    optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in models], array)
    TrainingStep(array, optimizer, loss, modes=("eager",))(X)
    made = calls["made"]
    with pytest.raises(FusionError, match="cannot be captured"):
        CapturedStep(array, optimizer, loss, X, compiling=False)
    assert calls["made"] == made
    CapturedStep(array, optimizer, loss_of, X, compiling=False)  # raises nothing
