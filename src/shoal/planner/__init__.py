"""Planning: fuse trials into arrays, pack arrays into jobs, and place jobs on devices by the policy."""

from shoal.planner.grouping import Grouping
from shoal.planner.packing import PACKINGS, CostPacking, NoPacking, Packing, make_packing
from shoal.planner.plan_input import Placement, PlanInput
from shoal.planner.planner import plan

__all__ = [
    "PACKINGS",
    "CostPacking",
    "Grouping",
    "NoPacking",
    "Packing",
    "Placement",
    "PlanInput",
    "make_packing",
    "plan",
]
