"""Packing: which arrays share a process. The contract of a packing, and the packings (pack_opt of Pack)."""

from shoal.planner.packing.base import Candidate, NoPacking, Packing, PackingContext
from shoal.planner.packing.cost import CostPacking
from shoal.planner.packing.groups import check_groups
from shoal.planner.packing.prediction import Prediction, predicted
from shoal.planner.packing.registry import PACKINGS, make_packing

__all__ = [
    "PACKINGS",
    "Candidate",
    "CostPacking",
    "NoPacking",
    "Packing",
    "PackingContext",
    "Prediction",
    "check_groups",
    "make_packing",
    "predicted",
]
