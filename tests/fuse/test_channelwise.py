"""Padding, interpolation and channel shuffles: equal results, and chains of them keep the channel-major layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import Make, check, check_table

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
CASES = {**PADS, **OTHERS}


FIRSTS: dict[str, tuple[Make, Tensor]] = {
    **{f"{axes}d": (lambda axes=axes: FIRST[axes](4, 4, 1), x) for axes, x in INPUTS.items()},
    **{f"one {axes}d": (lambda axes=axes: FIRST[axes](4, 4, 1), x[0]) for axes, x in INPUTS.items()},
    "in another order": (lambda: nn.Linear(4, 4), INPUTS[2]),
}


def test_layers() -> None:
    """Also of one sample, and of data that is not channel-major."""
    cases = {name: (layer, f"{axes}d") for name, (axes, layer) in CASES.items()}
    kept = [*PADS, "pixel shuffle", "pixel unshuffle", "unfold", "fold"]
    one = {f"{name} of one": (CASES[name][1], f"one {CASES[name][0]}d") for name in kept}
    other = {
        f"{name} in another order": (CASES[name][1], "in another order")
        for name in ("Circular 2d", "nearest 2d", "pixel shuffle", "unfold")
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
