"""PointNet for classification and for segmentation of point clouds (Qi et al., arXiv:1612.00593)."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload, adam

__all__ = ["Classifier", "Segmenter", "loss", "workload"]

CLASSES = 16
PARTS = 4
ALIGNMENT = 1e-3
"""Weight of the term that keeps the feature transform close to orthogonal (equation 2)."""


POINTWISE = partial(nn.Conv1d, kernel_size=1)
"""A layer that every point goes through, [N, C, P] -> [N, C', P]."""


def perceptron(layer: Callable[[int, int], nn.Module], *widths: int) -> nn.Sequential:
    """Such layers, each before a norm and a ReLU."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [layer(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class TNet(nn.Module):
    """Predicts a C x C transform of the points, the identity at first."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.channels = channels
        self.points = perceptron(POINTWISE, channels, width, 2 * width, 16 * width)
        self.head = perceptron(nn.Linear, 16 * width, 8 * width, 4 * width)
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
        self.early = perceptron(POINTWISE, 3, width, width)
        self.align_features = TNet(width, width) if transform else None
        self.late = perceptron(POINTWISE, width, width, 2 * width, 16 * width)

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
        self.head = perceptron(nn.Linear, 16 * width, 8 * width, 4 * width)
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
        self.points = perceptron(POINTWISE, 17 * width, 8 * width, 4 * width, 2 * width)
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


def batch(samples: int, points: int, of_points: bool) -> Batch:
    labels = torch.randint(0, PARTS, (samples, points)) if of_points else torch.randint(0, CLASSES, (samples,))
    return torch.randn(samples, 3, points), labels


def workload(kind: type[nn.Module], full: bool) -> Workload:
    samples, points, width = (32, 2500, 64) if full else (8, 64, 16)
    of_points = kind is Segmenter
    return Workload(
        sizes=f"N={samples}, {points} points, width {width}, Adam",
        samples=samples,
        model=partial(kind, width),
        batch=partial(batch, samples, points, of_points),
        phases=(Phase(loss, adam),),
        draws=not of_points,
    )
