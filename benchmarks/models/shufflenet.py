"""ShuffleNet V2 for images of 32 x 32 pixels (Ma et al., arXiv:1807.11164, table 5)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["CHANNELS", "shufflenet_v2"]

CLASSES = 10
CHANNELS = {0.5: (24, 48, 96, 192, 1024), 1.0: (24, 116, 232, 464, 1024)}
"""By the paper's width: of the first convolution, of three stages, and of the last convolution."""
BLOCKS = (4, 8, 4)


def convolution(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
    ]


class Block(nn.Module):
    """Two branches whose channels are shuffled: of a stride of 1, one of them leaves its half as it is."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        half = after // 2
        self.stride = stride
        self.left: nn.Module = nn.Identity()
        if stride > 1:
            self.left = nn.Sequential(
                *convolution(before, before, 3, stride, groups=before), *convolution(before, half, 1), nn.ReLU()
            )
        self.right = nn.Sequential(
            *(*convolution(before if stride > 1 else half, half, 1), nn.ReLU()),
            *convolution(half, half, 3, stride, groups=half),
            *(*convolution(half, half, 1), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x, x) if self.stride > 1 else x.chunk(2, dim=1)
        out = torch.stack([self.left(left), self.right(right)], dim=2)
        return out.flatten(1, 2)  # one channel of each in turn


def shufflenet_v2(channels: Sequence[int], blocks: Sequence[int] = BLOCKS) -> nn.Module:
    """Channels as one of `CHANNELS`; so many blocks in each of the stages."""
    first, *stages, last = channels
    layers = [*convolution(3, first, 3), nn.ReLU()]  # stride 1 and no pooling: the images are small
    before = first
    for after, count in zip(stages, blocks, strict=True):
        layers += [Block(before, after, stride=2), *(Block(after, after, stride=1) for _ in range(count - 1))]
        before = after
    layers += [*convolution(before, last, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, CLASSES))
