"""Convolutions by every lowering: outputs and gradients equal those of each member alone."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import Make, Of, check, check_table

from shoal.fuse.api import fuse
from shoal.fuse.autotune import forced_lowerings

torch.manual_seed(11)
SEQUENCE = torch.randn(3, 4, 9, dtype=torch.float64)
IMAGE = torch.randn(2, 4, 7, 6, dtype=torch.float64)
VOLUME = torch.randn(2, 4, 4, 5, 4, dtype=torch.float64)

NAMES = {kind: [f"conv{n}d", f"conv_transpose{n}d"] for n, kind in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))}
LOWERINGS = ("grouped", "bmm", "loop")
"""A shared input takes one convolution where it does not have the lowering that is asked for."""


def two(kind: type[nn.Module], kernel: Any = 3, **options: Any) -> Make:
    """As the first layer, whose input all members share, and as the second, with inputs of their own."""
    return lambda: nn.Sequential(kind(4, 6, kernel, **options), nn.Tanh(), kind(6, 4, kernel, **options))


CASES: dict[str, tuple[Make, Tensor]] = {
    "1d": (two(nn.Conv1d), SEQUENCE),
    "1d pointwise": (two(nn.Conv1d, 1), SEQUENCE),
    "1d strided": (two(nn.Conv1d, stride=2, padding=2, bias=False), SEQUENCE),
    "1d same": (two(nn.Conv1d, 5, padding="same"), SEQUENCE),
    "2d": (two(nn.Conv2d), IMAGE),
    "2d pointwise": (two(nn.Conv2d, 1), IMAGE),
    "2d pointwise to many": (lambda: nn.Sequential(nn.Conv2d(4, 3, 1), nn.Conv2d(3, 64, 1)), IMAGE),
    "2d pointwise strided": (two(nn.Conv2d, 1, stride=2), IMAGE),
    "2d pointwise padded": (two(nn.Conv2d, 1, padding=1), IMAGE),
    "2d strided": (two(nn.Conv2d, stride=(2, 1), padding=(2, 1)), IMAGE),
    "2d dilated": (two(nn.Conv2d, dilation=(1, 2), padding=2), IMAGE),
    "2d oblong": (two(nn.Conv2d, (3, 2), bias=False), IMAGE),
    "2d same": (two(nn.Conv2d, padding="same", dilation=2), IMAGE),
    "2d same of an even kernel": (two(nn.Conv2d, 3, padding="same", dilation=(1, 3)), IMAGE),
    "2d valid": (two(nn.Conv2d, padding="valid"), IMAGE),
    "2d in groups": (two(nn.Conv2d, groups=2, padding=1), IMAGE),
    "2d depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 3, groups=4)), IMAGE),
    "2d circular": (two(nn.Conv2d, padding=1, padding_mode="circular"), IMAGE),
    "2d to many channels": (lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.Conv2d(3, 64, 3)), IMAGE),
    "2d uneven": (two(nn.Conv2d, 5, padding=2), IMAGE.repeat(3, 1, 2, 2)),
    "2d of one sample": (two(nn.Conv2d), IMAGE[0]),
    "3d": (two(nn.Conv3d, (2, 3, 1), padding=1), VOLUME),
    "3d pointwise": (two(nn.Conv3d, 1), VOLUME),
    "transposed 1d": (two(nn.ConvTranspose1d, stride=2, output_padding=1), SEQUENCE),
    "transposed 2d": (two(nn.ConvTranspose2d), IMAGE),
    "transposed 2d of one pixel": (two(nn.ConvTranspose2d, 4), IMAGE[:, :, :1, :1]),
    "transposed 2d strided": (two(nn.ConvTranspose2d, 4, stride=2, padding=1, bias=False), IMAGE),
    "transposed 2d dilated": (two(nn.ConvTranspose2d, stride=(3, 2), dilation=2, output_padding=(1, 0)), IMAGE),
    "transposed 2d padded by more than its stride": (two(nn.ConvTranspose2d, dilation=2, output_padding=1), IMAGE),
    "transposed 2d in groups": (two(nn.ConvTranspose2d, groups=2, padding=1), IMAGE),
    "transposed 2d of one sample": (two(nn.ConvTranspose2d), IMAGE[0]),
    "transposed 3d": (two(nn.ConvTranspose3d, stride=(1, 2, 1), padding=1), VOLUME[:, :, :3, :3, :3]),
}  # fmt: skip


def using(lowering: str) -> Any:
    """All convolutions by one lowering, where they have it."""
    return forced_lowerings({name: lowering for names in NAMES.values() for name in names})


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_lowering_equals_the_members(lowering: str) -> None:
    with using(lowering):
        check_table(CASES, members=[2], steps=1)


def test_one_member_is_itself() -> None:
    check_table(CASES, members=[1], steps=1)


torch.manual_seed(12)
SHARED = {
    "convolution": (F.conv2d, torch.randn(6, 4, 3, 3, dtype=torch.float64), nn.Conv2d),
    "transposed": (F.conv_transpose2d, torch.randn(4, 6, 3, 3, dtype=torch.float64), nn.ConvTranspose2d),
}
BIAS = torch.randn(6, dtype=torch.float64)
LAYOUTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "shared": lambda m, x: x,
    "model-major": lambda m, x: x * m.scale,
    "channel-major": lambda m, x: m.before(x),
    "channels last": lambda m, x: (x * m.scale).contiguous(memory_format=torch.channels_last),
}
ARGUMENTS: dict[str, Callable[[nn.Module, Tensor], tuple[Any, Any]]] = {
    "own weight, own bias": lambda m, w: (m.weight, m.bias),
    "own weight, shared bias": lambda m, w: (m.weight, BIAS),
    "own weight": lambda m, w: (m.weight, None),
    "shared weight, own bias": lambda m, w: (w, m.bias),
    "shared weight, shared bias": lambda m, w: (w, BIAS),
    "shared weight": lambda m, w: (w, None),
}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_any_mix_of_own_and_shared_arguments(lowering: str) -> None:
    def run(m: Any, x: Tensor) -> dict[str, Tensor]:
        inputs = {name: layout(m, x) for name, layout in LAYOUTS.items()}
        return {
            f"{kind}, {layout}, {name}": func(given, *arguments(m.layers[kind], weight), padding=1) * m.scale[0]
            for kind, (func, weight, _) in SHARED.items()
            for layout, given in inputs.items()
            for name, arguments in ARGUMENTS.items()
        }

    def make() -> nn.Module:
        layers = nn.ModuleDict({kind: layer(4, 6, 3) for kind, (_, _, layer) in SHARED.items()})
        return Of(run, layers=layers, before=nn.Conv2d(4, 4, 1), scale=nn.Parameter(torch.rand(4, 1, 1)))

    with using(lowering):
        check(make, IMAGE, members=3, steps=1)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d], ids=lambda kind: kind.__name__)
def test_autocast_gives_the_types_of_the_members(kind: type[nn.Module], lowering: str) -> None:
    weight = torch.randn(4, 4, 3, 3)

    def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        func = F.conv2d if kind is nn.Conv2d else F.conv_transpose2d
        return model.layers(x), func(x, weight, model.bias)

    def make() -> nn.Module:
        model = Of(run, layers=nn.Sequential(kind(4, 4, 3), kind(4, 4, 3)))
        model.bias = nn.Parameter(torch.randn(4))
        return model

    models = [make() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16), using(lowering):
        expected = [model(IMAGE.float()) for model in models]
        result = fuse(models)(IMAGE.float())
    for i, own in enumerate(zip(*expected, strict=True)):
        assert result[i].dtype == torch.bfloat16
        torch.testing.assert_close(result[i], torch.stack(own), rtol=0.05, atol=0.05)


class Counted(TorchDispatchMode):
    """Counts operators on images, those of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, Tensor) and arg.dim() > 2 for arg in args):
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(model: Make, x: Tensor, members: int = 4) -> Counter[str]:
    """Of one forward and backward pass, after a first one, of which what it may change is copied."""
    array = fuse([model().double() for _ in range(members)])
    array(x)
    with Counted() as counted:
        out = array(x)
        out.backward(torch.ones_like(out))
    return counted.calls


@pytest.mark.parametrize(("lowering", "convolutions"), [("one", 1), ("bmm", 1), ("loop", 4)])
def test_a_shared_input_takes_one_convolution_or_a_loop(lowering: str, convolutions: int) -> None:
    with using(lowering):
        assert operators(lambda: nn.Conv2d(4, 6, 3), IMAGE)["convolution"] == convolutions


@pytest.mark.parametrize(
    "name", ["1d", "2d", "2d same", "2d pointwise", "3d pointwise", "transposed 1d", "transposed 2d"]
)
@pytest.mark.parametrize(("lowering", "convolutions"), [("grouped", 2), ("bmm", 1), ("loop", 8)])
def test_a_lowering_is_what_it_is_called(name: str, lowering: str, convolutions: int) -> None:
    if lowering == "bmm" and name.startswith("transposed"):
        pytest.skip("a product with columns that are added up has never been the fastest lowering")
    with using(lowering):
        calls = operators(*CASES[name])
    assert calls["convolution"] == calls["convolution_backward"] == convolutions


def test_a_chain_that_stays_channel_major_copies_nothing() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(16, 8, 1),
        )

    with using("grouped"):
        calls = operators(make, torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert calls["convolution"] == 3
    assert not {"clone", "copy_", "stack", "cat"} & set(calls)


def test_an_error_speaks_of_one_member() -> None:
    array = fuse([nn.Sequential(nn.Conv2d(4, 3, 3), nn.Conv2d(6, 4, 3)) for _ in range(2)])
    with pytest.raises(RuntimeError, match=r"weight of size \[4, 6, 3, 3\], expected input\[2, 3, 5, 4\]"):
        array(IMAGE.float())
