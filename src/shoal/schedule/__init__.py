"""Placement policies: which job runs on which device. The contract of a policy, and the policies."""

from shoal.core.event import TurnStats
from shoal.core.resources import Ledger
from shoal.schedule.auto import OBJECTIVES, Auto
from shoal.schedule.base import (
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
from shoal.schedule.check import check_plan
from shoal.schedule.convergence import Convergence
from shoal.schedule.exact import Exact
from shoal.schedule.expected_finish import ExpectedFinish
from shoal.schedule.knapsack import FF, FFD, WF, WFD, Fifo, Knapsack
from shoal.schedule.refusals import refusal, start_or_resume
from shoal.schedule.registry import POLICIES, make_policy
from shoal.schedule.time_sharing import TimeSharing
from shoal.schedule.water_filling import WaterFilling

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
