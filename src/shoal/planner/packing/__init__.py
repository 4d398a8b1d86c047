"""Which arrays share a process: the contract of a packing, and the packings (pack_opt of Pack)."""

from shoal.planner.packing.base import Candidate, Packing, Scene
from shoal.planner.packing.batch_size import BatchSize
from shoal.planner.packing.check import check_groups
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.knn import KNN
from shoal.planner.packing.prediction import Prediction, predicted
from shoal.planner.packing.random import Random
from shoal.planner.packing.registry import PACKINGS, make_packing
from shoal.planner.packing.single import Single

__all__ = [
    "KNN",
    "PACKINGS",
    "BatchSize",
    "Candidate",
    "Cost",
    "Packing",
    "Prediction",
    "Random",
    "Scene",
    "Single",
    "check_groups",
    "make_packing",
    "predicted",
]
