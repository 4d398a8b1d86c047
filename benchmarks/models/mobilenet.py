"""MobileNetV3-Large (Howard et al., arXiv:1905.02244, table 1) and MobileNetV2, for images of 32 x 32 pixels."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Phase, Workload, adam, cross_entropy, pictures

__all__ = ["LAYERS", "conv", "mobilenet_v2", "mobilenet_v3_large", "workload"]

CLASSES = 10
LAYERS = (
    # kernel, expanded, out, squeeze and excite, activation, stride
    (3, 16, 16, False, nn.ReLU, 1),
    (3, 64, 24, False, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 1),
    (5, 72, 40, True, nn.ReLU, 2),
    (5, 120, 40, True, nn.ReLU, 1),
    (5, 120, 40, True, nn.ReLU, 1),
    (3, 240, 80, False, nn.Hardswish, 2),
    (3, 200, 80, False, nn.Hardswish, 1),
    (3, 184, 80, False, nn.Hardswish, 1),
    (3, 184, 80, False, nn.Hardswish, 1),
    (3, 480, 112, True, nn.Hardswish, 1),
    (3, 672, 112, True, nn.Hardswish, 1),
    (5, 672, 160, True, nn.Hardswish, 2),
    (5, 960, 160, True, nn.Hardswish, 1),
    (5, 960, 160, True, nn.Hardswish, 1),
)

LAYERS_V2 = (
    # expansion, out, blocks, stride of the first
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""Of MobileNetV2 (Sandler et al., arXiv:1801.04381, table 2)."""


def scaled(channels: int, width: float) -> int:
    """Channels by a width multiplier, a multiple of 8 and not less than 90% of what was asked for."""
    asked = channels * width
    rounded = max(8, int(asked + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * asked else rounded + 8


def conv(
    before: int,
    after: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] = nn.Identity,
) -> nn.Module:
    """A convolution without bias, a batch norm and an activation."""
    layers = [
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
    ]
    return nn.Sequential(*layers, *([] if activation is nn.Identity else [activation()]))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, scaled(channels, 0.25), 1)
        self.excite = nn.Conv2d(scaled(channels, 0.25), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Bottleneck(nn.Module):
    """Expand, filter each channel, excite, project; with a shortcut where shapes agree."""

    def __init__(
        self, kernel: int, before: int, inside: int, after: int, excite: bool, activation: type[nn.Module], stride: int
    ) -> None:
        super().__init__()
        self.shortcut = stride == 1 and before == after
        layers = [conv(before, inside, activation=activation)] if inside != before else []
        layers.append(conv(inside, inside, kernel, stride, inside, activation))
        if excite:
            layers.append(SqueezeExcite(inside))
        self.body = nn.Sequential(*layers, conv(inside, after))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


def mobilenet_v3_large(width: float, blocks: Sequence[Any] = LAYERS) -> nn.Module:
    before, last, hidden = (scaled(channels, width) for channels in (16, 960, 1280))
    layers = [conv(3, before, 3, activation=nn.Hardswish)]  # stride 1: the images are small
    for kernel, inside, out, *others in blocks:
        after = scaled(out, width)
        layers.append(Bottleneck(kernel, before, scaled(inside, width), after, *others))
        before = after
    layers += [conv(before, last, activation=nn.Hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Linear(last, hidden), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(hidden, CLASSES)]
    return nn.Sequential(*layers)


def mobilenet_v2(width: float) -> nn.Module:
    before, last = scaled(32, width), scaled(1280, width)
    layers = [conv(3, before, 3, activation=nn.ReLU6)]  # stride 1: the images are small
    for expansion, out, count, first in LAYERS_V2:
        after = scaled(out, width)
        for stride in (first, *[1] * (count - 1)):
            layers.append(Bottleneck(3, before, expansion * before, after, False, nn.ReLU6, stride))
            before = after
    layers += [conv(before, last, activation=nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(last, CLASSES))


def workload(full: bool) -> Workload:
    samples, width = (1024, 1.0) if full else (4, 0.25)
    return Workload(
        sizes=f"32x32, N={samples}, width {width}, Adam",
        samples=samples,
        model=partial(mobilenet_v3_large, width),
        batch=partial(pictures, samples, CLASSES),
        phases=(Phase(cross_entropy, adam),),
        draws=True,
    )
