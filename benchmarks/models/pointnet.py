"""PointNet for classification and for segmentation of point clouds (Qi et al., arXiv:1612.00593)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["classification", "segmentation"]

CLASSES = 16
PARTS = 4
ALIGNMENT = 1e-3
"""Weight of the term that keeps the feature transform close to orthogonal (equation 2)."""


def pointwise(widths: Sequence[int]) -> nn.Sequential:
    """A perceptron that every point goes through, [N, C, P] -> [N, C', P]."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers)


def head(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class TNet(nn.Module):
    """Predicts a C x C transform of the points, the identity at first."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.channels = channels
        self.points = pointwise((channels, width, 2 * width, 16 * width))
        self.head = head((16 * width, 8 * width, 4 * width))
        self.last = nn.Linear(4 * width, channels * channels)
        nn.init.zeros_(self.last.weight)
        with torch.no_grad():
            self.last.bias.copy_(torch.eye(channels).flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.points(x).amax(2))).view(-1, self.channels, self.channels)


class Features(nn.Module):
    """A cloud's global feature, its points' own, and the transform of these."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.align_input = TNet(3, width)
        self.early = pointwise((3, width, width))
        self.align_features = TNet(width, width)
        self.late = pointwise((width, width, 2 * width, 16 * width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.early(torch.bmm(self.align_input(x), x))
        transform = self.align_features(x)
        x = torch.bmm(transform, x)
        return self.late(x).amax(2), x, transform


class Classifier(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = Features(width)
        self.head = head((16 * width, 8 * width, 4 * width))
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole, _, transform = self.features(x)
        return self.last(self.dropout(self.head(whole))), transform


class Segmenter(nn.Module):
    """Labels every point by its own feature and the cloud's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = Features(width)
        self.points = pointwise((17 * width, 8 * width, 4 * width, 2 * width))
        self.last = nn.Conv1d(2 * width, PARTS, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole, points, transform = self.features(x)
        joined = torch.cat([points, whole.unsqueeze(2).expand(-1, -1, points.shape[2])], 1)
        return self.last(self.points(joined)), transform


def loss(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    scores, transform = net(x)
    eye = torch.eye(transform.shape[-1], device=x.device)
    distance = (torch.bmm(transform, transform.transpose(1, 2)) - eye).square().sum((1, 2)).mean()
    return F.cross_entropy(scores, y) + ALIGNMENT * distance


def adam(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-3 * factor)


def classification(full: bool) -> Workload:
    samples, points, width = (32, 2500, 64) if full else (8, 64, 16)
    return Workload(
        name="PointNet, classification",
        sizes=f"N={samples}, {points} points, width {width}, Adam",
        samples=samples,
        model=lambda: Classifier(width),
        batch=lambda: (torch.randn(samples, 3, points), torch.randint(0, CLASSES, (samples,))),
        phases=(Phase(loss, adam),),
        draws=True,
    )


def segmentation(full: bool) -> Workload:
    samples, points, width = (32, 2500, 64) if full else (8, 64, 16)
    return Workload(
        name="PointNet, segmentation",
        sizes=f"N={samples}, {points} points, width {width}, Adam",
        samples=samples,
        model=lambda: Segmenter(width),
        batch=lambda: (torch.randn(samples, 3, points), torch.randint(0, PARTS, (samples, points))),
        phases=(Phase(loss, adam),),
    )
