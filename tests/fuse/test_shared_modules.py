"""Modules at several paths of a model, some of which run member by member."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from twins import close, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.structure import entries, find_unfused_parts, mismatch

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

Models = list[nn.Module]


def twice(part: nn.Module, other: nn.Module | None = None) -> nn.Module:
    """A module at two paths, or two of one kind."""
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 4), part if other is None else other, nn.Linear(4, 3))


class Counting(nn.Module):
    """Multiplies by the number of its calls."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.sign * self.calls * x.tanh()


class Cell(nn.Module):
    """A module, and a list of others."""

    def __init__(self, first: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Maybe(nn.Module):
    """A block that may be None."""

    def __init__(self, block: nn.Module | None) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.block is None else self.block(x)


def inner(act: nn.Module) -> nn.Module:
    part = nn.Sequential(nn.Linear(4, 4), act)
    return nn.Sequential(part, nn.Linear(4, 4), part)


def listed(act: nn.Module, depth: int = 1) -> nn.Module:
    """First, and last in a list."""
    return Cell(act, *(nn.Linear(4, 4) for _ in range(depth)), act)


def beside(act: nn.Module, depth: int) -> nn.Module:
    """In what goes as a whole, because of its list, and outside of it."""
    part = nn.Sequential(act)
    return nn.Sequential(Cell(part, *(nn.Linear(4, 4) for _ in range(depth))), part)


def beside_list(depth: int) -> nn.Module:
    """In a list that differs, and outside of it."""
    act = nn.PReLU()
    return nn.Sequential(Cell(nn.Tanh(), act, *(nn.Linear(4, 4) for _ in range(depth))), act)


ALIKE: dict[str, tuple[Callable[[], Models], set[str]]] = {
    "one activation": (lambda: [twice(nn.ReLU()), twice(nn.Tanh())], {"1.1", "1.3"}),
    "three kinds": (lambda: [twice(nn.ReLU()), twice(nn.Tanh()), twice(nn.GELU())], {"1.1", "1.3"}),
    "parameters and none": (lambda: [twice(nn.ReLU()), twice(nn.PReLU())], {"1.1", "1.3"}),
    "two parameters": (lambda: [twice(nn.PReLU()), twice(nn.PReLU(4))], {"1.1", "1.3"}),
    "buffers": (lambda: [twice(Counting(1)), twice(Counting(-1))], {"1.1", "1.3"}),
    "within what stands twice": (lambda: [inner(nn.ReLU()), inner(nn.Tanh())], {"1.0.1"}),
    "one against two": (lambda: [twice(nn.ReLU()), twice(nn.ReLU(), nn.ReLU())], {"1.1", "1.3"}),
    "two against one": (lambda: [twice(nn.Linear(4, 4), nn.Linear(4, 4)), twice(nn.Linear(4, 4))], {"1.1", "1.3"}),
    "in a list": (lambda: [listed(nn.ReLU()), listed(nn.Tanh())], {"1.first", "1.layers.1"}),
    "in lists of two lengths": (lambda: [listed(nn.PReLU()), listed(nn.PReLU(), 2)], {"1"}),
    "in what goes as a whole": (lambda: [beside(nn.ReLU(), 1), beside(nn.Tanh(), 2)], {"1.0", "1.1"}),
    "below what goes as a whole": (lambda: [beside_list(1), beside_list(2)], {"1.0", "1.1"}),
    "a block or None": (lambda: [Maybe(None), Maybe(nn.Tanh())], {"1"}),
    "a block, and then None": (lambda: [Maybe(nn.Tanh()), Maybe(None)], {"1"}),
}


def made(name: str) -> Models:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), model).double() for model in ALIKE[name][0]()]


def adam(model: nn.Module, b: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01 * (b + 1), eps=1e-2)


@pytest.mark.parametrize("name", ALIKE)
def test_three_steps_equal_those_of_the_members_alone(name: str) -> None:
    models = made(name)
    twins = copy.deepcopy(models)
    array = fuse(models, strict=False)
    optimizer = fuse_optimizers([adam(model, b) for b, model in enumerate(models)], array)
    alone = [adam(twin, b) for b, twin in enumerate(twins)]
    for _ in range(3):
        optimizer.zero_grad()
        whole = array(X)
        whole.square().mean((1, 2)).sum().backward()
        optimizer.step()
        for b, (twin, own) in enumerate(zip(twins, alone, strict=True)):
            own.zero_grad()
            out = twin(X)
            close(whole[b], out, f"output of {b}")
            out.square().mean().backward()
            own.step()
    for b, (member, twin) in enumerate(zip(array.unfuse(), twins, strict=True)):
        for key, value in twin.state_dict().items():
            close(member.state_dict()[key], value, f"{key} of {b}")


@pytest.mark.parametrize("name", ALIKE)
def test_what_runs_apart(name: str) -> None:
    models = made(name)
    assert mismatch(*map(entries, models[:2])) is not None
    found = find_unfused_parts(models)
    assert found is not None
    assert set(found.modules) == ALIKE[name][1]
    ids = [id(parameter) for _, _, parameter in fuse(models, strict=False).unfused_parameters()]
    assert len(ids) == len(set(ids))


def dropping(rate: float, width: int) -> nn.Module:
    torch.manual_seed(width)
    return twice(nn.Sequential(nn.Linear(4, width), nn.Dropout(rate), nn.Linear(width, 4))).double()


def test_masks_at_both_paths_do_not_depend_on_the_company() -> None:
    models = [dropping(0.3, 5), dropping(0.6, 7)]
    alone = [fuse([copy.deepcopy(model)], seeds=[b]) for b, model in enumerate(models)]
    array = fuse(models, seeds=range(2), strict=False)
    for _ in range(2):
        compare(array(X), [own(X)[0] for own in alone])


REFUSED: dict[str, tuple[Callable[[], Sequence[nn.Module]], bool, str]] = {
    "one against two": (
        lambda: [twice(nn.ReLU()), twice(nn.ReLU(), nn.ReLU())],
        True,
        "at '3': the module at '1' against .*ReLU training; .*run '1', '3' member by member with strict=False",
    ),
    "other paths": (
        lambda: [nn.Sequential(a := nn.ReLU(), nn.ReLU(), a), nn.Sequential(nn.ReLU(), b := nn.ReLU(), b)],
        True,
        "at '2': the module at '0' against the module at '1'; .*run '0', '1', '2' member by member",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, strict, message = REFUSED[name]
    with pytest.raises(FusionError, match=message):
        fuse(make(), strict=strict)
