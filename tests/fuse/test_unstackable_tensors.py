"""Tensors that cannot be rows of one tensor: refused by their path, or equal attributes; frozen integers are kept."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.frozen import same_values
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.rows import bytes_of
from shoal.fuse.transaction import Transaction

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class OwnClass(nn.Parameter):
    """A parameter with a state of its own, as those that hold quantized weights."""

    scale = 0.5


MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
    "mkldnn": lambda dense: dense.float().to_mkldnn(),
    "class": lambda dense: OwnClass(dense, requires_grad=False),
}


class Holding(nn.Module):
    def __init__(self, held: Tensor, where: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        if where == "buffer" and not isinstance(held, nn.Parameter):
            self.register_buffer("held", held)
        elif where == "buffer":
            self.held = held
        else:
            self.parts = [held]

    def forward(self, x: Tensor) -> Tensor:
        held = self.parts[0] if hasattr(self, "parts") else self.held
        return (held if held.layout is torch.strided else held.to_dense()).double() @ self.layer(x)


def models(kind: str, where: str, differ: bool) -> list[nn.Module]:
    return [Holding(MAKE[kind](torch.eye(4, dtype=torch.float64) * (1 + differ * b)), where) for b in range(2)]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(("where", "path"), [("buffer", "held"), ("attribute", "parts.0")])
def test_one_of_each_member_is_refused_by_its_path(kind: str, where: str, path: str) -> None:
    with pytest.raises(FusionError, match=rf"'{path}' is a .*, of which an array cannot hold one for each member"):
        fuse(models(kind, where, differ=True))


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc"])
def test_an_equal_attribute_is_shared(kind: str) -> None:
    own, alone = models(kind, "attribute", differ=False), models(kind, "attribute", differ=False)
    for one, other in zip(own, alone, strict=True):
        other.load_state_dict(one.state_dict())
    array = fuse(own)
    for _ in range(2):
        torch.testing.assert_close(array(X), torch.stack([model(X) for model in alone]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind != "class"])
def test_values_bytes_and_rollback(kind: str) -> None:
    make = MAKE[kind]
    one, same, other = make(torch.eye(4)), make(torch.eye(4)), make(torch.eye(4) * 2)
    assert same_values(one, same)
    assert not same_values(one, other)
    assert not same_values(one, torch.eye(4))
    assert bytes_of([one, same]) == 2 * bytes_of([one]) > 0
    model = nn.Linear(1, 1)
    model.held = one
    transaction = Transaction([model])
    model.held = other
    assert transaction.changed() is not None
    transaction.restore()
    assert model.held is one
    assert same_values(one, same)


class Coded(nn.Module):
    """A linear layer of a frozen code of another dtype."""

    def __init__(self, code: Tensor) -> None:
        super().__init__()
        self.code = nn.Parameter(code, requires_grad=False)
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.code.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("members", [1, 3])
def test_a_frozen_integer_parameter(dtype: torch.dtype, differ: bool, members: int) -> None:
    own = [Coded(torch.tensor([0, 1, differ * b, 2]).to(dtype)) for b in range(members)]
    alone = [copy.deepcopy(model) for model in own]
    array = fuse(own)
    made = [[torch.optim.Adam(m.parameters(), 0.1 + 0.1 * b) for b, m in enumerate(each)] for each in (own, alone)]
    optimizer = fuse_optimizers(made[0], array)
    for _ in range(3):
        optimizer.zero_grad()
        array.map(loss, X).sum().backward()
        optimizer.step()
        for model, each in zip(alone, made[1], strict=True):
            each.zero_grad()
            loss(model, X).backward()
            each.step()
    for mine, other in zip(array.unfuse(), alone, strict=True):
        for name, value in other.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-9, atol=1e-12, msg=name)
    once = [tuple(tensor.shape) for _, tensor, _ in array.shared_parameters()]
    assert once == ([(4,)] if members > 1 and not differ else [])


def loss(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean()
