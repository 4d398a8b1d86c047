"""Packing: which arrays share a process. The contract of a packing, and the packings (pack_opt of Pack)."""

from shoal.plan.packing.base import Candidate, NoPacking, Packing, PackingContext
from shoal.plan.packing.cost import CostPacking
from shoal.plan.packing.packs import check_packs
from shoal.plan.packing.prediction import Prediction, predicted
from shoal.plan.packing.registry import PACKINGS, make_packing

__all__ = [
    "PACKINGS",
    "Candidate",
    "CostPacking",
    "NoPacking",
    "Packing",
    "PackingContext",
    "Prediction",
    "check_packs",
    "make_packing",
    "predicted",
]
