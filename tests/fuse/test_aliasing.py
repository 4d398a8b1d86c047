"""Views of members' tensors: writes through a view, and writes to the tensor that it views."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import Of, build, check, compare

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import _copies
from shoal.fuse.api import fuse
from shoal.fuse.stacked import Stacked

torch.set_num_threads(1)

N, C, H = 2, 4, 4
X = torch.randn(N, 3, H + 2, H + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

Function = Callable[[Tensor], Tensor]

VIEWS: dict[str, Function] = {
    "view, channels joined": lambda x: x.view(N, -1),
    "view, samples and channels joined": lambda x: x.view(N * C, H, H),
    "reshape": lambda x: x.reshape(N * C, -1),
    "reshape_as": lambda x: x.reshape_as(torch.empty(N * C, H * H)),
    "view_as": lambda x: x.view_as(torch.empty(N * C, H * H)),
    "view of bits": lambda x: x.view(torch.int64).view(torch.float64),
    "flatten": lambda x: x.flatten(),
    "flatten samples": lambda x: torch.flatten(x, 1),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "contiguous": lambda x: x.contiguous(),
    "contiguous, if it is not": lambda x: x if x.is_contiguous() else x.contiguous(),
    "a view of a view": lambda x: x.view(N * C, H, H).transpose(0, 1).unsqueeze(0),
    "a copy of a copy": lambda x: x.view(N * C, H * H).view(N, C, H, H).transpose(0, 1)[1:].transpose(0, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "movedim": lambda x: x.movedim(1, -1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "index": lambda x: x[:, 1:, None, 2],
    "index of each member's own": lambda x: x[x.sum((1, 2, 3)).argmax()],
    "indices of each member's own": lambda x: x[x.sum((1, 2, 3)).argmax(), x.sum((0, 2, 3)).argmax()],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: x.split([1, 3], 1)[1],
    "tensor_split": lambda x: x.tensor_split(3, 1)[0],
    "unbind": lambda x: x.unbind(1)[1],
    "hsplit": lambda x: x.hsplit(2)[1],
    "iterated": lambda x: list(x)[1],
    "unfold": lambda x: x.unfold(2, 2, 2),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "expand": lambda x: x.expand(1, N, C, H, H),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.empty(1))[0],
    "view_as_complex": lambda x: torch.view_as_complex(x.unflatten(-1, (2, 2))),
    "to": lambda x: x.to(torch.float64),
    "to the same format": lambda x: x.to(memory_format=torch.contiguous_format),
    "detach": lambda x: x.detach(),
}
COPIES: dict[str, Function] = {
    "clone": lambda x: x.clone(),
    "contiguous in another format": lambda x: x.contiguous(memory_format=torch.channels_last),
    "to another format": lambda x: x.to(memory_format=torch.channels_last),
    "transposed and contiguous": lambda x: x.transpose(1, 2).contiguous(),
}
FUNCTIONS = {**VIEWS, **COPIES}

SOURCES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "channel-major": lambda m, x: m.conv(x).tanh(),
    "model-major": lambda m, x: torch.stack([m.scale * x[:, i % 3, 1:-1, 1:-1] + i for i in range(C)], 1),
}


def model(fn: Callable[..., object]) -> nn.Module:
    return Of(fn, conv=nn.Conv2d(3, C, 3), scale=nn.Linear(1, 1).weight)


def held_alike(fn: Callable[[nn.Module, Tensor], object]) -> None:
    """The results of `fn` are those of the members alone, or it is refused."""
    with torch.no_grad():
        array = fuse(build(lambda: model(fn), 2))
        try:
            found = array(X)
        except FusionError as error:
            if "which is a copy in the array" not in str(error):
                raise
            return
        compare(found, [one(X) for one in build(lambda: model(fn), 2)])


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_written_through_the_view(source: str, name: str) -> None:
    def fn(m: nn.Module, x: Tensor) -> list[Tensor]:
        base = SOURCES[source](m, x)
        view = FUNCTIONS[name](base)
        view.mul_(2)
        view[-1:] = 3
        return [base, view]

    held_alike(fn)


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_written_beneath_the_view(source: str, name: str) -> None:
    def fn(m: nn.Module, x: Tensor) -> list[Tensor]:
        base = SOURCES[source](m, x)
        view = FUNCTIONS[name](base)
        base += 1
        F.relu(base, inplace=True)
        return [base, view]

    held_alike(fn)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_three_copies_are_one_to_a_member(written: int) -> None:
    def fn(m: nn.Module, x: Tensor) -> list[Tensor]:
        base = m.conv(x)
        first = base.view(N * C, H, H)
        all_of_them = [base, first, first.transpose(0, 1).flatten(1).view(H, N * C, H), first.flatten()]
        all_of_them[written].neg_()
        return all_of_them

    held_alike(fn)


def test_a_view_that_runs_in_a_loop() -> None:
    def fn(m: nn.Module, x: Tensor) -> list[Tensor]:
        base = m.scale * x
        with torch.autocast("cpu", torch.bfloat16):  # where vmap cannot be used
            part = base.hsplit(3)[0]
        part.zero_()
        return [base, part]

    held_alike(fn)


QUICK: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "what was a view's base is gone": lambda m, x: F.relu_(m.conv(x).flatten()),
    "what was a batch norm's result is gone": lambda m, x: (
        F.batch_norm(m.conv(x), None, None, training=True).view(N * C, H, H).mul_(2)
    ),
    "a view that is one for all": lambda m, x: F.dropout(m.conv(x).flatten(1), 0.0, True, inplace=True),
    "nothing is written": lambda m, x: [base := m.conv(x), base.flatten() + 1],
    "a clone is written": lambda m, x: [base := m.conv(x), base.flatten().clone().add_(1)],
    "contiguous as it is": lambda m, x: [base := m.conv(x), base.contiguous().add_(1)],
}


@pytest.mark.parametrize("name", QUICK)
def test_what_cannot_be_stale_runs_at_once(name: str) -> None:
    check(lambda: model(QUICK[name]), X)


def test_memory_that_is_free_is_forgotten() -> None:
    before = len(_copies.alias_sets)
    for _ in range(5):
        source = Stacked(torch.zeros(3, 2, 4).transpose(0, 1))
        source.flatten()
    assert len(_copies.alias_sets) <= before + 1
