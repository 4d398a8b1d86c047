"""Short names for clusters and jobs in tables."""

from shoal.cluster.device import Cluster, Device, Node
from shoal.cost.demand import Demand
from shoal.schedule.action import JobState
from shoal.schedule.base import JobView

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
