"""What to try next, and how far."""

from shoal.algorithms.base import Algorithm
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.random import Random
from shoal.algorithms.registry import ALGORITHMS

__all__ = ["ALGORITHMS", "Algorithm", "Grid", "Hyperband", "Random"]
