"""ResNets for images of 32 x 32 pixels (He et al., arXiv:1512.03385)."""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Phase, Workload, adadelta, cross_entropy, pictures

__all__ = ["BLOCKS", "resnet", "workload"]

CLASSES = 10
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
"""In each stage, by the number of layers."""


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class Unfused(Block):
    """The same, of another class: where members differ in it, an array trains their blocks one after another."""


def resnet(width: int, blocks: Sequence[int], unfused: int = 0) -> nn.Module:
    """A ResNet with so many blocks in each stage, the first few of them `Unfused`."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage, count in enumerate(blocks):
        after = width * 2**stage
        for number in range(count):
            block = Unfused if len(layers) - 3 < unfused else Block
            layers.append(block(before, after, stride=2 if stage and not number else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def workload(full: bool, unfused: int = 0) -> Workload:
    """ResNet-18, of whose eight blocks some are not fused."""
    samples, width = (128, 64) if full else (4, 8)
    return Workload(
        sizes=f"32x32, N={samples}, width {width}, Adadelta",
        samples=samples,
        model=partial(resnet, width, BLOCKS[18]),
        batch=partial(pictures, samples, CLASSES),
        phases=(Phase(cross_entropy, adadelta),),
        others=(partial(resnet, width, BLOCKS[18], unfused),) if unfused else (),
    )
