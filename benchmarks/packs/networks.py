"""The networks of the packing paper for pictures of 32 x 32 pixels, small, with an activation of choice."""

from collections.abc import Callable

import torch
from models.mobilenet import Bottleneck, conv
from torch import Tensor, nn

__all__ = ["NETWORKS"]

Activation = type[nn.Module]
CLASSES = 10


def perceptron(activation: Activation) -> nn.Module:
    hidden = nn.Linear(3072, 64), activation(), nn.Linear(64, 64), activation()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, CLASSES))


def mobilenet(activation: Activation) -> nn.Module:
    """Inverted residuals that expand four times (Sandler et al., arXiv:1801.04381)."""
    blocks = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2)]
    inside = (Bottleneck(3, before, 4 * before, after, False, activation, stride) for before, after, stride in blocks)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    return nn.Sequential(conv(3, 8, 3, 2, 1, activation), *inside, conv(32, 64, 1, 1, 1, activation), *head)


def activated(before: int, after: int, stride: int, activation: Activation, kernel: int = 3) -> nn.Sequential:
    """A convolution after a normalisation and an activation."""
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(before), activation(), convolution)


class Residual(nn.Module):
    """Two convolutions and a shortcut around them (He et al., arXiv:1603.05027)."""

    def __init__(self, before: int, after: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.body = nn.Sequential(activated(before, after, stride, activation), activated(after, after, 1, activation))
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


class Dense(nn.Module):
    """A convolution, whose channels are put behind those that it sees (Huang et al., arXiv:1608.06993)."""

    def __init__(self, before: int, growth: int, activation: Activation) -> None:
        super().__init__()
        self.body = activated(before, growth, 1, activation)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def with_head(channels: int, activation: Activation, *layers: nn.Module) -> nn.Module:
    head = nn.BatchNorm2d(channels), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    return nn.Sequential(*layers, *head)


def resnet(activation: Activation) -> nn.Module:
    blocks = (Residual(*sizes, activation) for sizes in ((8, 8, 1), (8, 16, 2), (16, 32, 2)))
    return with_head(32, activation, nn.Conv2d(3, 8, 3, 2, 1, bias=False), *blocks)


def densenet(activation: Activation) -> nn.Module:
    """Three blocks of two convolutions, with halving between them."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False)]
    for _ in range(2):
        layers += [Dense(16, 8, activation), Dense(24, 8, activation)]
        layers += [activated(32, 16, 1, activation, kernel=1), nn.AvgPool2d(2)]
    return with_head(32, activation, *layers, Dense(16, 8, activation), Dense(24, 8, activation))


NETWORKS: dict[str, Callable[[Activation], nn.Module]] = {
    "MLP-3": perceptron, "MobileNet": mobilenet, "ResNet": resnet, "DenseNet": densenet,
}  # fmt: skip
