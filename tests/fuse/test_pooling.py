"""Pooling: outputs and gradients equal those of each member alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_or_stacked import check_mixes
from torch import Tensor, nn
from twins import Make, Of, build, check, check_table

from shoal.fuse.api import fuse

torch.manual_seed(7)
INPUTS = {
    1: torch.randn(3, 4, 9, dtype=torch.float64),
    2: torch.randn(3, 4, 7, 8, dtype=torch.float64),
    3: torch.randn(2, 4, 4, 6, 4, dtype=torch.float64),
}
FIRST = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

POOLS: dict[str, tuple[int, Make]] = {
    "max 1d": (1, lambda: nn.MaxPool1d(2)),
    "max 2d": (2, lambda: nn.MaxPool2d(2, stride=1, padding=1, ceil_mode=True)),
    "max 2d dilated": (2, lambda: nn.MaxPool2d((2, 1), dilation=2)),
    "max 3d": (3, lambda: nn.MaxPool3d(2)),
    "max 1d with indices": (1, lambda: nn.MaxPool1d(2, return_indices=True)),
    "max 2d with indices": (2, lambda: nn.MaxPool2d(2, return_indices=True)),
    "max 3d with indices": (3, lambda: nn.MaxPool3d(2, return_indices=True)),
    "average 1d": (1, lambda: nn.AvgPool1d(3, 2, 1)),
    "average 2d": (2, lambda: nn.AvgPool2d(2, count_include_pad=False, padding=1)),
    "average 3d": (3, lambda: nn.AvgPool3d(2, divisor_override=3)),
    "power 1d": (1, lambda: nn.LPPool1d(2, 3)),
    "power 2d": (2, lambda: nn.LPPool2d(2, 2)),
    "power 3d": (3, lambda: nn.LPPool3d(2, 2)),
    "adaptive average 1d": (1, lambda: nn.AdaptiveAvgPool1d(3)),
    "adaptive average 2d": (2, lambda: nn.AdaptiveAvgPool2d((None, 2))),
    "adaptive average 3d": (3, lambda: nn.AdaptiveAvgPool3d(2)),
    "adaptive max 1d": (1, lambda: nn.AdaptiveMaxPool1d(3)),
    "adaptive max 2d": (2, lambda: nn.AdaptiveMaxPool2d(2)),
    "adaptive max 3d": (3, lambda: nn.AdaptiveMaxPool3d((2, 3, None))),
    "adaptive max 2d with indices": (2, lambda: nn.AdaptiveMaxPool2d(2, return_indices=True)),
    "unpooled 1d": (1, lambda: _unpooled(nn.MaxPool1d, nn.MaxUnpool1d)),
    "unpooled 2d": (2, lambda: _unpooled(nn.MaxPool2d, nn.MaxUnpool2d)),
    "unpooled 3d": (3, lambda: _unpooled(nn.MaxPool3d, nn.MaxUnpool3d)),
}


def _unpooled(pool: type[nn.Module], unpool: type[nn.Module]) -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        values, indices = m.pool(x)
        return m.unpool(values * 2, indices, output_size=x.shape)

    return Of(run, pool=pool(2, return_indices=True), unpool=unpool(2))


FIRSTS: dict[str, tuple[Make, Tensor]] = {
    **{f"{axes}d": (lambda axes=axes: FIRST[axes](4, 3, 1), x) for axes, x in INPUTS.items()},
    **{f"one {axes}d": (lambda axes=axes: FIRST[axes](4, 3, 1), x[0]) for axes, x in INPUTS.items()},
    **{
        f"{axes}d in another order": (lambda: Of(lambda m, given: m.w * given, w=nn.Parameter(torch.randn(()))), x)
        for axes, x in INPUTS.items()
    },
}


def test_pools() -> None:
    """Also of one sample, and of data that is not channel-major."""
    cases = {name: (pool, f"{axes}d") for name, (axes, pool) in POOLS.items()}
    one = {f"{name} of one": (pool, f"one {axes}d") for name, (axes, pool) in POOLS.items() if "unpooled" not in name}
    other = {
        f"{name} in another order": (POOLS[name][1], f"{POOLS[name][0]}d in another order")
        for name in ("max 1d", "adaptive average 2d", "average 3d")
    }
    check_table({**cases, **one, **other}, FIRSTS, loops=())


def test_powers_of_the_members_own() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv1d(4, 3, 1), nn.LPPool1d(1.5 + torch.initial_seed() % 3, 2))

    check(make, INPUTS[1], members=3, apart=True)  # the module takes it for a plain float


def test_shared_indices_and_own_values_in_every_mix() -> None:
    x = torch.randn(2, 3, 4, 6, 8, dtype=torch.float64)
    pooled = [F.max_pool2d(own, 2, return_indices=True) for own in x]
    values, indices = (torch.stack(part) for part in zip(*pooled, strict=True))
    check_mixes(lambda v, i: F.max_unpool2d(v, i, 2), nn.Parameter(values), indices)


@pytest.mark.parametrize("pool", [nn.FractionalMaxPool2d(2, 3), nn.FractionalMaxPool3d(2, output_ratio=0.5)])
def test_regions_drawn_are_those_of_the_member_alone(pool: nn.Module) -> None:
    axes = 2 if isinstance(pool, nn.FractionalMaxPool2d) else 3

    def make() -> nn.Module:
        return nn.Sequential(FIRST[axes](4, 3, 1), pool)

    together = fuse(build(make, 5), range(5))(INPUTS[axes])
    for b, model in enumerate(build(make, 5)):
        torch.testing.assert_close(together[b], fuse([model], [b])(INPUTS[axes])[0], rtol=1e-9, atol=1e-9)
