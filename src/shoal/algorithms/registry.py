"""The algorithms by name."""

from shoal.algorithms.base import Algorithm
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.random import Random

__all__ = ["ALGORITHMS"]

ALGORITHMS: dict[str, type[Algorithm]] = {"grid": Grid, "random": Random, "hyperband": Hyperband}
"""Every algorithm by its name."""
