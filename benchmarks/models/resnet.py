"""ResNets for images of 32 x 32 pixels (He et al., arXiv:1512.03385)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

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


def resnet(width: int, blocks: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage, count in enumerate(blocks):
        after = width * 2**stage
        layers.append(Block(before, after, stride=2 if stage else 1))
        layers += [Block(after, after, stride=1) for _ in range(count - 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def loss(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y)


def adadelta(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(net.parameters(), lr=factor)


def workload(full: bool) -> Workload:
    samples, width = (128, 64) if full else (4, 8)
    return Workload(
        name="ResNet-18",
        sizes=f"32x32, N={samples}, width {width}, Adadelta",
        samples=samples,
        model=lambda: resnet(width, BLOCKS[18]),
        batch=lambda: (torch.randn(samples, 3, 32, 32), torch.randint(0, CLASSES, (samples,))),
        phases=(Phase(loss, adadelta),),
    )
