"""Planning: fuse trials into arrays, pack arrays into jobs, and place jobs on devices by the policy."""

from shoal.planner.grouping import Grouping
from shoal.planner.packing import PACKINGS, Cost, NoPacking, Packing, make_packing
from shoal.planner.partition import Profiles
from shoal.planner.plan_input import Placement, PlanInput
from shoal.planner.planner import plan

__all__ = [
    "PACKINGS",
    "Cost",
    "Grouping",
    "NoPacking",
    "Packing",
    "Placement",
    "PlanInput",
    "Profiles",
    "make_packing",
    "plan",
]
