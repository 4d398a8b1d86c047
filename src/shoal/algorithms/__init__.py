"""What to try next, and how far."""

from shoal.algorithms.base import Algorithm
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.random import Random

__all__ = ["ALGORITHMS", "Algorithm", "Grid", "Hyperband", "Random"]

ALGORITHMS: dict[str, type[Algorithm]] = {"grid": Grid, "random": Random, "hyperband": Hyperband}
"""Every algorithm by its name."""
