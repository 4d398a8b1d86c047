"""Short names for clusters and jobs in tables."""

from dataclasses import replace

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import TurnStats
from shoal.plan.schedule.base import JobState, JobView
from shoal.plan.schedule.check import check_plan

GB = 10**9


def gpu(index, memory=80, kind="A100", **changes):
    return Device(f"cuda:{index}", kind, memory * GB, **changes)


def cluster(*devices, cores=64):
    return Cluster((Node("n0", cores, devices),))


def needs(compute=0.5, memory=1.0, cores=1.0, seconds=10.0):
    return Demand(compute, int(memory * GB), cores, seconds)


def job(name, demand=None, on=None, **amounts):
    """A job that waits, or runs on a device; its demand is one for A100 unless given by kind."""
    state = JobState.WAITING if on is None else JobState.RUNNING
    return JobView(name, demand or {"A100": needs(**amounts)}, state, () if on is None else (on,))


def placed(plan):
    """The starts of a plan as job -> device, in order."""
    return {action.job: action.devices[0] for action in plan.actions}


def refused(plan):
    return {refusal.job: refusal.reason for refusal in plan.refusals}


def turn(*losses, seconds=10.0):
    """A quantum in which these losses were seen."""
    return TurnStats(max(losses), min(losses), losses[-1], len(losses), seconds)


def waiting(name, *quanta, **changes):
    return replace(job(name), quanta=quanta, ran=10.0 * len(quanta), **changes)


def suspended(name, *quanta, since=0.0, home="cuda:0", **changes):
    return waiting(name, *quanta, state=JobState.SUSPENDED, since=since, home=home, **changes)


def running(name, *quanta, on="cuda:0", since=0.0, **changes):
    return waiting(name, *quanta, state=JobState.RUNNING, devices=(on,), since=since, home=on, **changes)


def decide(policy, jobs, where=None, now=10.0):
    """A plan that was checked: actions by job, and when it wants to be asked again."""
    where = where or cluster(gpu(0))
    plan = policy.plan(jobs, where, now)
    check_plan(plan, jobs, where, now)
    assert len({action.job for action in plan.actions}) == len(plan.actions)
    return {action.job: type(action) for action in plan.actions}, plan.wake


LOW, HIGH = turn(1.0), turn(2.0)
