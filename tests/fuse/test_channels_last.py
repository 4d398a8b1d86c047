"""Models and inputs in channels_last memory format: equal numbers, and members that keep their format."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from twins import build, close, compare, compare_state

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.stacked import Stacked

LAST = torch.channels_last
X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    """What asks for the memory format, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu()
        y = y.contiguous(memory_format=LAST).to(memory_format=torch.contiguous_format)
        return x + self.last(y.clone(memory_format=torch.preserve_format))


NETS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "pointwise": lambda: nn.Conv2d(4, 3, 1),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 3, stride=2),
    "chain": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.GELU()
    ),
    "norms": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)),
    "pooled": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    "resized": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample(scale_factor=2), nn.PixelShuffle(2)),
    "block": Block,
}


@pytest.mark.pairwise
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_equals_the_members_alone(make: Callable[[], nn.Module], members: int, own: bool) -> None:
    def last() -> nn.Module:
        return make().to(memory_format=LAST)

    models, alone = build(last, members), build(last, members)
    array = fuse(models)
    optimizer = fuse_optimizers([SGD(model.parameters(), lr=0.1) for model in models], array)
    optimizers = [SGD(model.parameters(), lr=0.1) for model in alone]
    each = [(X + 0.1 * b * own).to(memory_format=LAST) for b in range(members)]
    given = Stacked(torch.stack(each)) if own else each[0]
    for _ in range(2):
        optimizer.zero_grad()
        result = array(given)
        result.sin().sum().backward()
        expected = [model(x) for model, x in zip(alone, each, strict=True)]
        for alone_result, own_optimizer in zip(expected, optimizers, strict=True):
            own_optimizer.zero_grad()
            alone_result.sin().sum().backward()
        compare(result, expected)
        compare_state(array, alone)
        optimizer.step()
        for own_optimizer in optimizers:
            own_optimizer.step()
    for b, (member, twin) in enumerate(zip(array.unfuse(), alone, strict=True)):
        close(member(X), twin(X), f"member {b} by itself")


def laid_out(x: Tensor) -> list[Tensor]:
    """All ways to ask for a format; an array, which has layouts of its own, takes them for a hint."""
    ways = [x.to(memory_format=LAST), x.contiguous(memory_format=LAST), x.clone(memory_format=LAST)]
    ways += [x.to(torch.float32, memory_format=LAST), x.float().double().to("cpu", memory_format=LAST)]
    ways += [torch.zeros_like(x, memory_format=LAST), x.clone(memory_format=torch.preserve_format)]
    ways += [y.contiguous() for y in ways] + [y.to(memory_format=torch.contiguous_format) for y in ways]
    return ways


@pytest.mark.parametrize("last", [False, True])
def test_functions_that_take_a_format(last: bool) -> None:
    each = [(X + b).to(memory_format=LAST) if last else X + b for b in range(3)]
    rows: list[bool] = []

    def ask(model: nn.Module, x: Tensor) -> list[Tensor]:
        ways = laid_out(model(x))
        rows.extend(y.contiguous().is_contiguous() for y in ways)
        assert all(isinstance(y.is_contiguous(memory_format=LAST), bool) for y in ways)
        return [y.flatten(1).view(-1, 2) for y in ways]

    array = fuse([nn.Identity() for _ in each])
    compare(array.map(ask, Stacked(torch.stack(each))), [ask(nn.Identity(), x) for x in each])
    assert all(rows)
