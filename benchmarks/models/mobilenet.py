"""MobileNetV3-Large (Howard et al., arXiv:1905.02244, table 1) and MobileNetV2, for images of 32 x 32 pixels."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Phase, Workload, adam, cross_entropy, pictures

__all__ = ["LAYERS", "mobilenet_v2", "mobilenet_v3_large", "workload"]

CLASSES = 10
LAYERS = (
    # kernel, expanded, out, squeeze and excite, hard swish, stride
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
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


def conv(before: int, after: int, kernel: int, stride: int, groups: int, activation: nn.Module | None) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
    ]
    return nn.Sequential(*layers, *([activation] if activation is not None else []))


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
        self,
        kernel: int,
        before: int,
        inside: int,
        after: int,
        excite: bool,
        hard: bool,
        stride: int,
        otherwise: type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if hard else otherwise
        self.shortcut = stride == 1 and before == after
        layers = [conv(before, inside, 1, 1, 1, activation())] if inside != before else []
        layers.append(conv(inside, inside, kernel, stride, inside, activation()))
        if excite:
            layers.append(nn.Sequential(SqueezeExcite(inside)))
        self.body = nn.Sequential(*layers, conv(inside, after, 1, 1, 1, None))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


def mobilenet_v3_large(width: float, blocks: Sequence[Any] = LAYERS) -> nn.Module:
    before = scaled(16, width)
    layers: list[nn.Module] = [conv(3, before, 3, 1, 1, nn.Hardswish())]  # stride 1: the images are small
    for kernel, inside, out, excite, hard, stride in blocks:
        after = scaled(out, width)
        layers.append(Bottleneck(kernel, before, scaled(inside, width), after, excite, hard, stride))
        before = after
    last, hidden = scaled(960, width), scaled(1280, width)
    return nn.Sequential(
        *layers,
        conv(before, last, 1, 1, 1, nn.Hardswish()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(last, hidden),
        nn.Hardswish(),
        nn.Dropout(0.2),
        nn.Linear(hidden, CLASSES),
    )


def mobilenet_v2(width: float) -> nn.Module:
    before, last = scaled(32, width), scaled(1280, width)
    layers: list[nn.Module] = [conv(3, before, 3, 1, 1, nn.ReLU6())]  # stride 1: the images are small
    for expansion, out, count, stride in LAYERS_V2:
        after = scaled(out, width)
        for number in range(count):
            steps = 1 if number else stride
            layers.append(Bottleneck(3, before, expansion * before, after, False, False, steps, nn.ReLU6))
            before = after
    layers.append(conv(before, last, 1, 1, 1, nn.ReLU6()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(last, CLASSES))


def workload(full: bool) -> Workload:
    samples, width = (1024, 1.0) if full else (4, 0.25)
    return Workload(
        name="MobileNetV3-Large",
        sizes=f"32x32, N={samples}, width {width}, Adam",
        samples=samples,
        model=partial(mobilenet_v3_large, width),
        batch=partial(pictures, samples, CLASSES),
        phases=(Phase(cross_entropy, adam),),
        draws=True,
    )
