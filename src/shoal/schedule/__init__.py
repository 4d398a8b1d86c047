"""Which job runs where: the contract of a policy, and the policies."""

from shoal.schedule.action import Action, JobState, Plan, Refusal, Resize, Resume, Start, Stop, Suspend
from shoal.schedule.base import Changes, JobView, Policy, Quantum, Session
from shoal.schedule.check import check_plan
from shoal.schedule.fifo import Fifo
from shoal.schedule.knapsack import WFD, Knapsack
from shoal.schedule.registry import POLICIES, make_policy

__all__ = [
    "POLICIES",
    "WFD",
    "Action",
    "Changes",
    "Fifo",
    "JobState",
    "JobView",
    "Knapsack",
    "Plan",
    "Policy",
    "Quantum",
    "Refusal",
    "Resize",
    "Resume",
    "Session",
    "Start",
    "Stop",
    "Suspend",
    "check_plan",
    "make_policy",
]
