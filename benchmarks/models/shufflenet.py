"""ShuffleNet V2 for images of 32 x 32 pixels (Ma et al., arXiv:1807.11164, table 5)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.mobilenet import conv

__all__ = ["CHANNELS", "shufflenet_v2"]

CLASSES = 10
CHANNELS = {0.5: (24, 48, 96, 192, 1024), 1.0: (24, 116, 232, 464, 1024)}
"""By the paper's width: of the first convolution, of three stages, and of the last convolution."""
BLOCKS = (4, 8, 4)


class Block(nn.Module):
    """Two branches whose channels are shuffled: of a stride of 1, one of them leaves its half as it is."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        half = after // 2
        self.stride = stride
        self.left: nn.Module = nn.Identity()
        if stride > 1:
            self.left = nn.Sequential(
                conv(before, before, 3, stride, groups=before), conv(before, half, activation=nn.ReLU)
            )
        self.right = nn.Sequential(
            conv(before if stride > 1 else half, half, activation=nn.ReLU),
            conv(half, half, 3, stride, groups=half),
            conv(half, half, activation=nn.ReLU),
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x, x) if self.stride > 1 else x.chunk(2, dim=1)
        out = torch.stack([self.left(left), self.right(right)], dim=2)
        return out.flatten(1, 2)  # one channel of each in turn


def shufflenet_v2(channels: Sequence[int], blocks: Sequence[int] = BLOCKS) -> nn.Module:
    """Channels as one of `CHANNELS`; so many blocks in each of the stages."""
    before, *stages, last = channels
    layers = [conv(3, before, 3, activation=nn.ReLU)]  # stride 1 and no pooling: the images are small
    for after, count in zip(stages, blocks, strict=True):
        layers += [Block(before, after, stride=2), *(Block(after, after, stride=1) for _ in range(count - 1))]
        before = after
    layers.append(conv(before, last, activation=nn.ReLU))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, CLASSES))
