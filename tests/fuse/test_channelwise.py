"""Padding, pooling, interpolation and channel shuffles: equal results; chains of them keep the channel-major layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_or_stacked import check_mixes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import Make, Of, build, check, check_table

from shoal.fuse.api import fuse
from shoal.fuse.rules.base import channel_major, split_channels
from shoal.fuse.stacked import Stacked

torch.manual_seed(7)
INPUTS = {
    0: torch.randn(6, 4, dtype=torch.float64),
    1: torch.randn(3, 4, 9, dtype=torch.float64),
    2: torch.randn(3, 4, 6, 4, dtype=torch.float64),
    3: torch.randn(2, 4, 4, 3, 4, dtype=torch.float64),
}
FIRST: dict[int, Callable[..., nn.Module]] = {
    0: lambda *sizes: nn.Linear(*sizes[:2]),
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}

PADS: dict[str, tuple[int, Make]] = {
    f"{kind} {axes}d": (axes, lambda kind=kind, axes=axes, sizes=sizes: getattr(nn, f"{kind}Pad{axes}d")(*sizes))
    for kind, sizes in {
        "Zero": (1,),
        "Constant": (2, 0.5),
        "Reflection": (2,),
        "Replication": (1,),
        "Circular": (1,),
    }.items()
    for axes in (1, 2, 3)
}
OTHERS: dict[str, tuple[int, Make]] = {
    "some sides": (2, lambda: nn.ZeroPad2d((1, 0, -1, 2))),
    "some sides by reflection": (2, lambda: nn.ReflectionPad2d((1, 0, 2, 1))),
    "nearest 1d": (1, lambda: nn.Upsample(scale_factor=2)),
    "linear": (1, lambda: nn.Upsample(size=5, mode="linear")),
    "nearest 2d": (2, lambda: nn.Upsample((5, 9))),
    "exactly nearest": (2, lambda: nn.Upsample(scale_factor=1.5, mode="nearest-exact")),
    "bilinear": (2, lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear with corners": (2, lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
    "bicubic": (2, lambda: nn.Upsample(scale_factor=(2, 1), mode="bicubic")),
    "area": (2, lambda: nn.Upsample((3, 3), mode="area")),
    "nearest 3d": (3, lambda: nn.Upsample(scale_factor=2)),
    "trilinear": (3, lambda: nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True)),
    "upsampling": (2, lambda: nn.UpsamplingBilinear2d(scale_factor=2)),
    "pixel shuffle": (2, lambda: nn.PixelShuffle(2)),
    "pixel unshuffle": (2, lambda: nn.PixelUnshuffle(2)),
    "channel shuffle": (2, lambda: nn.ChannelShuffle(2)),
    "unfold": (2, lambda: nn.Unfold(2, dilation=2, padding=1)),
    "fold": (1, lambda: nn.Fold((4, 4), 2)),
    "flatten": (2, nn.Flatten),
    "flatten some": (3, lambda: nn.Flatten(1, 2)),
    "unflatten": (0, lambda: nn.Unflatten(1, (2, 2))),
    "unflatten from the end": (2, lambda: nn.Unflatten(-2, (3, 2))),
}
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
CASES = {**PADS, **OTHERS, **POOLS}


def _unpooled(pool: type[nn.Module], unpool: type[nn.Module]) -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        values, indices = m.pool(x)
        return m.unpool(values * 2, indices, output_size=x.shape)

    return Of(run, pool=pool(2, return_indices=True), unpool=unpool(2))


def scaled() -> nn.Module:
    """Leaves its input in the order of its memory."""
    return Of(lambda m, x: m.w * x, w=nn.Parameter(torch.randn(())))


FIRSTS: dict[str, tuple[Make, Tensor]] = {
    **{f"{axes}d": (lambda axes=axes: FIRST[axes](4, 4, 1), x) for axes, x in INPUTS.items()},
    **{f"one {axes}d": (lambda axes=axes: FIRST[axes](4, 4, 1), x[0]) for axes, x in INPUTS.items()},
    **{f"{axes}d in another order": (scaled, x) for axes, x in INPUTS.items()},
}


def test_layers() -> None:
    """Also of one sample, and of data that is not channel-major."""
    cases = {name: (layer, f"{axes}d") for name, (axes, layer) in CASES.items()}
    pools = [name for name in POOLS if "unpooled" not in name]
    one = {
        f"{name} of one": (CASES[name][1], f"one {CASES[name][0]}d")
        for name in (*PADS, *pools, "pixel shuffle", "pixel unshuffle", "unfold", "fold")
    }
    other = {
        f"{name} in another order": (CASES[name][1], f"{CASES[name][0]}d in another order")
        for name in (
            *("Circular 2d", "nearest 2d", "pixel shuffle", "unfold"),
            *("max 1d", "adaptive average 2d", "average 3d"),
        )
    }
    check_table({**cases, **one, **other}, FIRSTS, loops=())


def test_convolutions_pad_in_every_mode() -> None:
    def make(axes: int, mode: str) -> nn.Module:
        return nn.Sequential(*(FIRST[axes](4, 4, 3, padding=2, padding_mode=mode) for _ in range(2)))

    modes = ("zeros", "reflect", "replicate", "circular")
    check_table({f"{axes}d, {mode}": (partial(make, axes, mode), INPUTS[axes]) for axes in (1, 2, 3) for mode in modes},
                members=[3])  # fmt: skip


def test_values_of_the_members_own() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConstantPad2d(1, 0.5 + torch.initial_seed() % 4))

    check(make, INPUTS[2], members=3)


def test_powers_of_the_members_own() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv1d(4, 3, 1), nn.LPPool1d(1.5 + torch.initial_seed() % 3, 2))

    check(make, INPUTS[1], members=3, refused=True)  # the module takes it for a plain float


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


CHAIN: dict[str, Callable[[Any], Any]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": F.instance_norm,
    "relu": F.relu,
    "gelu": F.gelu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "prelu": lambda x: F.prelu(x, torch.rand(4, dtype=torch.float64)),
    "residual": lambda x: x + 2 * x,
    "max pool": lambda x: F.max_pool2d(x, 2),
    "max pool with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 2),
    "zeros": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), "reflect"),
    "resize": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "dropout": F.dropout,
    "channel dropout": F.dropout2d,
}
COPIES = {torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class _Sizes(TorchDispatchMode):
    """Records how many elements each copy moves."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COPIES and result.is_floating_point():
            self.copied.append(result.numel())
        return result


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", CHAIN)
def test_channel_major_memory_stays_and_nothing_is_transposed(name: str, channels_last: bool) -> None:
    merged = torch.randn(3, 8, 6, 6, dtype=torch.float64)
    if channels_last and name != "instance norm":  # whose kernel wants the other order
        merged = merged.contiguous(memory_format=torch.channels_last)
    x = split_channels(merged, 2)
    with _Sizes() as sizes:
        out: Tensor = CHAIN[name](Stacked(x)).whole
    assert channel_major(out)
    if "dropout" not in name:  # masks are made from scratch
        assert max(sizes.copied, default=0) < x.numel() // 4
