"""Planning: fuse trials into arrays, pack arrays into jobs, and place jobs on devices by the policy."""

from shoal.planner.grouping import Grouping
from shoal.planner.packing import KNN, PACKINGS, BatchSize, Cost, NoPacking, Packing, RandomPacking, make_packing
from shoal.planner.partition import Profiles
from shoal.planner.planner import Placement, Planner

__all__ = [
    "KNN",
    "PACKINGS",
    "BatchSize",
    "Cost",
    "Grouping",
    "NoPacking",
    "Packing",
    "Placement",
    "Planner",
    "Profiles",
    "RandomPacking",
    "make_packing",
]
