"""What makes jobs of trials: arrays of trials that are one model, jobs of arrays, and the policy's word on them."""

from shoal.planner.job import Array, ArrayKey, Job, Member, Purpose
from shoal.planner.partition import Profiles
from shoal.planner.planner import Placement, Planner

__all__ = ["Array", "ArrayKey", "Job", "Member", "Placement", "Planner", "Profiles", "Purpose"]
