"""Partial fusion: submodules in which members differ run member by member, and the rest runs at once."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import build, close, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import concat, fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    """`block` maps 8 features to 8."""

    def __init__(self, block: nn.Module, rate: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.block = block
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.block(self.first(x)))))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 8))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 8))


BLOCKS: dict[str, Sequence[Callable[[], nn.Module]]] = {
    "widths": (narrow, wide),
    "activations": (nn.ReLU, nn.Tanh, nn.GELU),
    "a block or none": (nn.Identity, wide),
    "options": (lambda: nn.Softmax(0), lambda: nn.Softmax(1)),
    "depths": (narrow, lambda: nn.Sequential(narrow(), narrow())),
    "parametrized or not": (lambda: nn.Linear(8, 8), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
}


def nets(name: str, members: int, rate: float = 0.0) -> list[nn.Module]:
    blocks = BLOCKS[name]
    return [build(lambda b=b: Net(blocks[b % len(blocks)](), rate), b + 1)[b] for b in range(members)]


@pytest.mark.parametrize("name", BLOCKS)
def test_three_steps_equal_those_of_the_members_alone(name: str) -> None:
    members = 4
    models = nets(name, members)
    twins = copy.deepcopy(models)
    make = lambda model, b: torch.optim.Adam(model.parameters(), lr=0.01 * (b + 1), eps=1e-2)  # noqa: E731
    alone = [make(twin, b) for b, twin in enumerate(twins)]
    array = fuse(models, strict=False)
    optimizer = fuse_optimizers([make(model, b) for b, model in enumerate(models)], array)
    loss = lambda model, x: F.cross_entropy(model(x), Y)  # noqa: E731
    for _ in range(3):
        optimizer.zero_grad()
        losses = array.map(loss, X)
        losses.sum().backward()
        optimizer.step()
        for twin, own in zip(twins, alone, strict=True):
            own.zero_grad()
            loss(twin, X).backward()
            own.step()
    assert len(optimizer.unfuse()) == members
    for b, (member, twin) in enumerate(zip(array.unfuse(), twins, strict=True)):
        for key, value in twin.state_dict().items():
            close(member.state_dict()[key], value, f"{key} of {b}")
    array.eval()
    compare(array(X), [twin.eval()(X) for twin in twins])


def test_only_the_block_runs_apart() -> None:
    array = fuse(nets("widths", 3), strict=False)
    assert {path for path, _, _ in array.stacked_tensors()} >= {"first.weight", "norm.running_mean", "head.bias"}
    assert not any(path.startswith("block") for path, _, _ in array.stacked_tensors())
    assert {(path, b) for path, b, _ in array.unfused_parameters() if path.endswith("0.weight")} == {
        ("block.0.weight", b) for b in range(3)
    }
    assert {id(p) for _, _, p in array.unfused_parameters()} <= {id(p) for p in array.parameters()}


def noisy(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, width), nn.Dropout(0.4), nn.Linear(width, 8), nn.Dropout(0.2))


def test_masks_do_not_depend_on_the_company() -> None:
    blocks = [noisy(3), noisy(5), nn.ReLU]  # two draws in some blocks and none in the last
    models = [build(lambda block=block: Net(block(), 0.3), 1)[0] for block in blocks]
    alone = [fuse([copy.deepcopy(model)], seeds=[b]) for b, model in enumerate(models)]
    array = fuse(models, seeds=range(3), strict=False)
    for _ in range(2):
        whole = array(X)
        for b, own in enumerate(alone):
            close(whole[b], own(X)[0], f"output of {b}")


def test_members_that_draw_apart_go_on_apart_after_a_selection() -> None:
    models = [build(lambda block=block: Net(block(), 0.3), 1)[0] for block in (noisy(3), nn.ReLU, noisy(3))]
    alone = fuse([copy.deepcopy(models[0])], seeds=[0])
    array = fuse(models, seeds=range(3), strict=False)
    array(X)
    alone(X)
    survivors = array.select([0, 2])
    assert not list(survivors.unfused_parameters())
    close(survivors(X)[0], alone(X)[0], "output")
    back = concat([survivors, fused_to_tick(Net(nn.ReLU(), 0.3).double(), survivors.tick)])
    assert len(list(back.unfused_parameters())) == 8  # two linear layers in two of three blocks


def fused_to_tick(model: nn.Module, tick: int) -> ModelArray:
    array = fuse([model], strict=False)
    array.tick = tick
    return array


def test_modes_reach_the_modules_apart() -> None:
    models = nets("a block or none", 2)
    twins = copy.deepcopy(models)

    def turns(model: Any, x: Tensor) -> Tensor:
        model.train()
        first = model(x)
        model.eval()
        return first + model(x)

    compare(fuse(models, strict=False).map(turns, X), [turns(twin, X) for twin in twins])


def test_attributes_and_parts_of_modules_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0 + depth))
            self.inner = nn.Linear(4, 4)
            self.extra = nn.ModuleList(nn.Linear(1, 1) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def twice(self, x: Tensor) -> Tensor:
            return 2 * x * self.scale

    class User(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.part = Scaled(depth)

        def forward(self, x: Tensor) -> Tensor:
            return self.part.twice(self.part.inner(x)) + self.part.scale

    models = [User(depth).double() for depth in (0, 1, 2)]
    twins = copy.deepcopy(models)
    array = fuse(models, strict=False)
    out = array(X)
    compare(out, [twin(X) for twin in twins])
    out.sum().backward()
    for b, twin in enumerate(twins):
        twin(X).sum().backward()
        for name, parameter in twin.named_parameters():
            if parameter.grad is not None:
                close(models[b].get_parameter(name).grad, parameter.grad, f"{name} of {b}")


def test_results_of_different_shape_stay_apart_until_their_shapes_agree() -> None:
    class Widths(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, width), nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    models = [Widths(width).double() for width in (2, 5)]
    array = fuse(models, strict=False)
    compare(array(X), [model(X) for model in models])


def tied() -> list[nn.Module]:
    models = [Net(nn.Sequential(nn.Linear(8, 8), kind())) for kind in (nn.ReLU, nn.Tanh)]
    for model in models:
        model.block.add_module("odd", nn.Linear(8, 8) if model is models[0] else nn.Identity())
        if model is models[0]:
            model.block.odd.weight = nn.Parameter(torch.zeros(8, 8))
            model.first.register_parameter("other", model.block.odd.weight)
        else:
            model.first.register_parameter("other", nn.Parameter(torch.zeros(8, 8)))
    return models


REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], bool, str]] = {
    "strict": (
        lambda: [Net(narrow()), Net(wide())],
        True,
        r"member 1 differs from member 0 at 'block.0': .*\(2, 8\).*\(16, 8\)|'block'.*strict=False",
    ),
    "strict shapes": (
        lambda: [nn.Sequential(nn.Linear(4, 2)), nn.Sequential(nn.Linear(4, 3))],
        True,
        r"member 1 differs from member 0 at '0.weight'.*\(2, 4\).*\(3, 4\).*run '0' member by member with strict=False",
    ),
    "the model itself": (lambda: [nn.Linear(2, 2), nn.Linear(2, 3)], False, "fuse only models of one structure$"),
    "tied across": (tied, False, "block.odd.weight is tied to a tensor outside of 'block.odd'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, strict, message = REFUSED[name]
    with pytest.raises(FusionError, match=message):
        fuse(make(), strict=strict)
