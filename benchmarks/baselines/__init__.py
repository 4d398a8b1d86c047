"""Policies and packings that the papers compare with, and nobody should choose: for benchmarks and tests.

`register` puts them into the registries of Shoal, by which `tune`, scenarios and the command line know their names.
"""

from baselines.packings import KNN, BatchSize, RandomPacking
from baselines.policies import BestFit, RoundRobin, ShortestFirst, Slaq
from shoal.plan.packing import PACKINGS
from shoal.plan.schedule import POLICIES

__all__ = [
    *("BASELINE_PACKINGS", "BASELINE_POLICIES", "KNN", "BatchSize", "BestFit", "RandomPacking", "RoundRobin"),
    *("ShortestFirst", "Slaq", "register"),
]

BASELINE_POLICIES = {"best_fit": BestFit, "round_robin": RoundRobin, "shortest_first": ShortestFirst, "slaq": Slaq}
BASELINE_PACKINGS = {"batch_size": BatchSize, "knn": KNN, "random": RandomPacking}


def register() -> None:
    """Make the names of all baselines known to Shoal, in this process."""
    POLICIES.update(BASELINE_POLICIES)
    PACKINGS.update(BASELINE_PACKINGS)
