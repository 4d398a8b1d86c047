"""Where configurations lie: a kernel density over the unit cube of a search space's parameters."""

import math
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Density"]

Point = Sequence[float]
"""A configuration, D numbers: a place in [0, 1], or the position of an option; NaN for a parameter it does not have."""


@final
class Density:
    """The mean of one product kernel around each point (Falkner et al. 2018, section 3.2).

    In a continuous dimension the kernel is a normal density cut off at 0 and 1; in one of c options it is that of
    Aitchison and Aitken 1976: 1 - h where the options are the same, h / (c - 1) where they differ. A point without a
    parameter says nothing about it: its kernel is 1, or 1 / c.

    Bandwidths follow the normal reference rule, h = 1.06 sigma n^(-1 / (4 + D)), n being the points that have the
    parameter. Of options, sigma^2 is half the chance that two drawn from the points differ: of two options that is
    their variance as 0 and 1, and it does not depend on the order in which options are written.

    Args:
        points: N of them, at least one.
        options: for each of the D dimensions how many options there are, or 0 where it is continuous.
        least: no bandwidth is less.
    """

    def __init__(self, points: Sequence[Point], options: Sequence[int], least: float) -> None:
        import numpy as np

        self._points = np.asarray(points, dtype=float).reshape(len(points), len(options))
        self._options = options
        scale = 1.06
        self.bandwidths: list[float] = []
        """Of each dimension."""
        for column, count in zip(self._points.T, options, strict=True):
            own = column[~np.isnan(column)]
            sigma = (_spread(own, count) if count else float(own.std())) if len(own) else 0.0
            bandwidth = max(scale * sigma * max(len(own), 1) ** (-1 / (4 + len(options))), least)
            self.bandwidths.append(min(bandwidth, _flat(count)) if count else bandwidth)

    def log(self, points: Sequence[Point]) -> "NDArray[Any]":
        """The logarithm of the density at M points. Shape [M]."""
        import numpy as np

        at = np.asarray(points, dtype=float).reshape(len(points), len(self._options))
        total = np.zeros((len(at), len(self._points)))
        for dimension, (count, width) in enumerate(zip(self._options, self.bandwidths, strict=True)):
            centres, values = self._points[:, dimension], at[:, dimension, None]
            if count:
                differ = math.log(width / (count - 1)) if count > 1 else 0.0
                kernel = np.where(values == centres, math.log1p(-width) if count > 1 else 0.0, differ)
                unknown = -math.log(count)
            else:
                inside = [_normal((1 - centre) / width) - _normal(-centre / width) for centre in centres]
                kernel = -0.5 * ((values - centres) / width) ** 2 - np.log(
                    np.sqrt(2 * np.pi) * width * np.array(inside)
                )
                unknown = 0.0
            kernel = np.where(np.isnan(centres), unknown, kernel)
            total += np.where(np.isnan(values), 0.0, kernel)
        greatest = total.max(axis=1)
        result: NDArray[Any] = greatest + np.log(np.exp(total - greatest[:, None]).mean(axis=1))
        return result

    def centre(self, rng: Random) -> list[float]:
        """One of the points."""
        chosen: list[float] = self._points[rng.randrange(len(self._points))].tolist()
        return chosen

    def near(self, centre: Point, dimension: int, factor: float, rng: Random) -> float:
        """One coordinate of a draw from the kernel around a point, with the bandwidth times a factor."""
        own, count = centre[dimension], self._options[dimension]
        width = factor * self.bandwidths[dimension]
        if math.isnan(own):
            return rng.randrange(count) if count else rng.random()
        if count:
            if rng.random() >= min(width, _flat(count)):
                return own
            other = rng.randrange(count - 1)
            return other + (other >= own)
        while not 0 <= (value := rng.gauss(own, width)) <= 1:
            pass
        return value


def _spread(positions: "NDArray[Any]", count: int) -> float:
    """Sigma of options."""
    import numpy as np

    shares = np.bincount(positions.astype(int), minlength=count) / len(positions)
    return math.sqrt((1 - float((shares**2).sum())) / 2)


def _flat(count: int) -> float:
    """The bandwidth with which all of so many options are equally likely."""
    return (count - 1) / count


def _normal(z: float) -> float:
    """The cumulative normal distribution."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
