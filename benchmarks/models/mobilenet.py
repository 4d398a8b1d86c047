"""MobileNetV3-Large for images of 32 x 32 pixels (Howard et al., arXiv:1905.02244, table 1)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["workload"]

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
        self, kernel: int, before: int, inside: int, after: int, excite: bool, hard: bool, stride: int
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if hard else nn.ReLU
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


def loss(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y)


def adam(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-3 * factor)


def workload(full: bool) -> Workload:
    samples, width = (1024, 1.0) if full else (4, 0.25)
    return Workload(
        name="MobileNetV3-Large",
        sizes=f"32x32, N={samples}, width {width}, Adam",
        samples=samples,
        model=lambda: mobilenet_v3_large(width),
        batch=lambda: (torch.randn(samples, 3, 32, 32), torch.randint(0, CLASSES, (samples,))),
        phases=(Phase(loss, adam),),
        draws=True,
    )
