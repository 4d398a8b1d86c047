"""PointNet for classification and for segmentation of point clouds (Qi et al., arXiv:1612.00593)."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload, adam

__all__ = ["Classifier", "classification", "loss", "segmentation"]

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
    """A cloud's global feature, its points' own, and the transform of these, if there is one."""

    def __init__(self, width: int, transform: bool) -> None:
        super().__init__()
        self.align_input = TNet(3, width)
        self.early = pointwise((3, width, width))
        self.align_features = TNet(width, width) if transform else None
        self.late = pointwise((width, width, 2 * width, 16 * width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x = self.early(torch.bmm(self.align_input(x), x))
        transform = None
        if self.align_features is not None:
            transform = self.align_features(x)
            x = torch.bmm(transform, x)
        return self.late(x).amax(2), x, transform


class Classifier(nn.Module):
    def __init__(self, width: int, transform: bool = True) -> None:
        super().__init__()
        self.features = Features(width, transform)
        self.head = head((16 * width, 8 * width, 4 * width))
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        whole, _, transform = self.features(x)
        return self.last(self.dropout(self.head(whole))), transform


class Segmenter(nn.Module):
    """Labels every point by its own feature and the cloud's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = Features(width, transform=True)
        self.points = pointwise((17 * width, 8 * width, 4 * width, 2 * width))
        self.last = nn.Conv1d(2 * width, PARTS, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        whole, points, transform = self.features(x)
        joined = torch.cat([points, whole.unsqueeze(2).expand(-1, -1, points.shape[2])], 1)
        return self.last(self.points(joined)), transform


def loss(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    scores, transform = net(x)
    if transform is None:
        return F.cross_entropy(scores, y)
    eye = torch.eye(transform.shape[-1], device=x.device)
    distance = (torch.bmm(transform, transform.transpose(1, 2)) - eye).square().sum((1, 2)).mean()
    return F.cross_entropy(scores, y) + ALIGNMENT * distance


def batch(samples: int, points: int, classes: int, of_points: bool) -> Batch:
    labels = torch.randint(0, classes, (samples, points) if of_points else (samples,))
    return torch.randn(samples, 3, points), labels


def classification(full: bool) -> Workload:
    return _workload(full, "PointNet, classification", Classifier, CLASSES)


def segmentation(full: bool) -> Workload:
    return _workload(full, "PointNet, segmentation", Segmenter, PARTS)


def _workload(full: bool, name: str, kind: type[nn.Module], classes: int) -> Workload:
    samples, points, width = (32, 2500, 64) if full else (8, 64, 16)
    of_points = kind is Segmenter
    return Workload(
        name=name,
        sizes=f"N={samples}, {points} points, width {width}, Adam",
        samples=samples,
        model=partial(kind, width),
        batch=partial(batch, samples, points, classes, of_points),
        phases=(Phase(loss, adam),),
        draws=not of_points,
    )
