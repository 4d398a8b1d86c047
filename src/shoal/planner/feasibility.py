"""What of a plan can be done at once, while jobs that are to leave their devices still hold them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shoal.core.device import Cluster
from shoal.schedule.action import Action, JobState, Plan, Resize, Resume, Start, Stop, Suspend
from shoal.schedule.base import JobView
from shoal.schedule.check import HeldResources

__all__ = ["FeasiblePlan", "feasible"]


@dataclass(frozen=True)
class FeasiblePlan:
    """What can be done of a plan, and what has to wait.

    Args:
        actions: to be done at once, in order.
        later: id of a job that the plan places and that waits -> why.
    """

    actions: tuple[Action, ...]
    later: dict[str, str]


def feasible(plan: Plan, jobs: Sequence[JobView], cluster: Cluster, leaving: Collection[str]) -> FeasiblePlan:
    """A live job leaves its device at its next step, not in the moment it is asked to. Until then it keeps what it has,
    so that at no moment a device or a node holds more than it can; who was to have that is left to the next plan, which
    is made as soon as it is free.

    Args:
        plan: a legal one.
        jobs: that it was made of.
        cluster: likewise.
        leaving: ids of jobs that were asked to leave before.
    """
    views = {job.id: job for job in jobs}
    held = HeldResources(jobs, cluster.places)
    closed = {name: job.id for job in jobs if job.id in leaving for name in job.devices}
    actions: list[Action] = []
    later: dict[str, str] = {}
    for action in plan.actions:
        before = views[action.job]
        if isinstance(action, (Suspend, Stop)) or not _stays(action, before):
            closed.update(dict.fromkeys(before.devices, before.id))
            actions.append(action)
            continue
        after = replace(before, state=JobState.RUNNING, devices=action.devices, share=action.share)
        if before.state is not JobState.RUNNING and (name := next(filter(closed.get, action.devices), None)):
            later[action.job] = f"waits until {closed[name]} has left {name}"
            continue
        held.remove(before)
        held.add(after)
        if excess := next(filter(None, map(held.excess, action.devices)), ""):
            held.remove(after)
            held.add(before)
            if before.state is not JobState.RUNNING:
                later[action.job] = f"waits until others have left their devices: {excess}"
            continue
        actions.append(action)
    return FeasiblePlan(tuple(actions), later)


def _stays(action: Start | Resume | Resize, job: JobView) -> bool:
    """Whether a running job stays on its device; one that moves has to leave it first."""
    return not isinstance(action, Resize) or action.devices == job.devices
