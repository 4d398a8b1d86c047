"""Placement policies: which job runs on which device. The contract of a policy, and the policies."""

from shoal.core.event import TurnStats
from shoal.core.resources import Ledger
from shoal.plan.schedule.auto import OBJECTIVES, Auto
from shoal.plan.schedule.base import (
    Action,
    JobState,
    JobView,
    Plan,
    Policy,
    Refusal,
    Resize,
    Resume,
    Start,
    Stop,
    Suspend,
)
from shoal.plan.schedule.check import check_plan
from shoal.plan.schedule.convergence import Convergence
from shoal.plan.schedule.exact import Exact
from shoal.plan.schedule.expected_finish import ExpectedFinish
from shoal.plan.schedule.knapsack import FF, FFD, WF, WFD, Fifo, Knapsack
from shoal.plan.schedule.refusals import refusal, start_or_resume
from shoal.plan.schedule.registry import POLICIES, make_policy
from shoal.plan.schedule.time_sharing import TimeSharing
from shoal.plan.schedule.water_filling import WaterFilling

__all__ = [
    "FF",
    "FFD",
    "OBJECTIVES",
    "POLICIES",
    "WF",
    "WFD",
    "Action",
    "Auto",
    "Convergence",
    "Exact",
    "ExpectedFinish",
    "Fifo",
    "JobState",
    "JobView",
    "Knapsack",
    "Ledger",
    "Plan",
    "Policy",
    "Refusal",
    "Resize",
    "Resume",
    "Start",
    "Stop",
    "Suspend",
    "TimeSharing",
    "TurnStats",
    "WaterFilling",
    "check_plan",
    "make_policy",
    "refusal",
    "start_or_resume",
]
