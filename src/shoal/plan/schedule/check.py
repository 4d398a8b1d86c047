"""Checks of plans: against the `Policy` contract, and for actions that must wait until jobs have left their devices."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import PolicyError
from shoal.core.resources import Ledger
from shoal.plan.schedule.base import Action, JobState, JobView, Plan, Resize, Resume, Start, Stop, Suspend

__all__ = ["FeasiblePlan", "check_plan", "feasible"]

_ROUNDING = 1e-6

_LEGAL: Mapping[type, tuple[JobState, ...]] = {
    Start: (JobState.WAITING,),
    Suspend: (JobState.RUNNING,),
    Resume: (JobState.SUSPENDED,),
    Resize: (JobState.RUNNING,),
    Stop: (JobState.RUNNING, JobState.SUSPENDED),
}
"""Legal states of a job for each action."""

_DevicePlaces = Mapping[str, tuple[Node, Device]]


def check_plan(plan: Plan, jobs: Sequence[JobView], cluster: Cluster, now: float) -> None:
    """Check that a plan is legal.

    Actions are taken in order, so a job may use resources that an earlier action of the plan has freed. Limits are
    checked on all devices of a job that an action gives more than it has. Other devices may be overfull, as other
    programs may have taken memory there, and a job that only gives back devices or compute may stay on them.

    Raises:
        PolicyError: The plan is illegal; the message names the action and the broken rule or limit.
    """
    state = {job.id: job for job in jobs}
    devices_by_name = cluster.places
    ledger = _ledger(plan, jobs, cluster)
    for action in plan.actions:
        job = state.get(action.job)
        if job is None:
            raise PolicyError(f"{action} names a job that does not exist")
        after = _view_after(action, job, devices_by_name)
        ledger.release(job.id)
        if isinstance(action, Stop):
            del state[job.id]
            continue
        state[job.id] = after
        ledger.hold(after)
        for name in after.devices if _takes_more(job, after, devices_by_name) else ():
            if excess_text := _excess_text(ledger, name):
                raise PolicyError(f"{action}: {excess_text}")
    _check_refusals(plan, {job.id for job in state.values() if not job.devices})
    if plan.wake is not None and not now < plan.wake < inf:
        raise PolicyError(f"`wake` must be finite and after now, {now!r} s, got {plan.wake!r} s")


def _ledger(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> Ledger:
    """Return the ledger of the nodes on which the actions of a plan take or free something, with all their jobs."""
    acting = {action.job for action in plan.actions}
    names = {name for action in plan.actions for name in getattr(action, "devices", ())}
    names.update(name for job in jobs if job.id in acting for name in job.devices)
    places = cluster.places
    touched = Cluster(tuple(dict.fromkeys(places[name][0] for name in sorted(names & places.keys()))))
    return Ledger(touched, (job for job in jobs if not touched.places.keys().isdisjoint(job.devices)))


def _view_after(action: Action, job: JobView, devices_by_name: _DevicePlaces) -> JobView:
    legal = _LEGAL[type(action)]
    if job.state not in legal:
        raise PolicyError(f"{action} names a job that is {job.state}; it must be {' or '.join(legal)}")
    if isinstance(action, (Suspend, Resize, Stop)) and not job.preemptible:
        raise PolicyError(f"{action} names a job that is not preemptible; only its end frees its devices")
    if not isinstance(action, (Suspend, Stop)):
        _check_width(action, job)
        for name in action.devices:
            _check_device(action, name, job, devices_by_name)
    return job.after(action)


def _check_width(action: Start | Resume | Resize, job: JobView) -> None:
    if not action.devices or len(set(action.devices)) < len(action.devices):
        raise PolicyError(f"{action} must name at least one device, and none twice")
    if len(action.devices) > job.scaling.max_devices:
        raise PolicyError(f"{action} names {len(action.devices)} devices; the job may use {job.scaling.max_devices}")
    if action.share is None:
        return
    if len(action.devices) > 1:
        raise PolicyError(f"{action} gives a share of several devices; a job of several devices has all of each")
    if not job.scaling.may_share:
        raise PolicyError(f"{action} gives a share to a job that cannot share; leave `share` out")
    if not (action.share > 0 and isfinite(action.share)):
        raise PolicyError(f"{action} gives a share that is not above 0 and finite")


def _check_device(action: Action, name: str, job: JobView, devices_by_name: _DevicePlaces) -> None:
    if name not in devices_by_name:
        raise PolicyError(f"{action} names a device that does not exist; there are {', '.join(devices_by_name)}")
    _, device = devices_by_name[name]
    if not device.healthy:
        raise PolicyError(f"{action} names a device that is not healthy")
    if device.kind not in job.demand:
        raise PolicyError(f"{action}: the job cannot run on {device.kind}, only on {', '.join(job.demand)}")


def _takes_more(before: JobView, after: JobView, devices_by_name: _DevicePlaces) -> bool:
    """Return whether a job gets a device, or compute of one, that it did not have."""
    devices = [devices_by_name[name][1] for name in after.devices]
    return any(x.name not in before.devices or after.compute(x) > before.compute(x) + _ROUNDING for x in devices)


def _excess_text(ledger: Ledger, name: str) -> str:
    """Return the exceeded limit of a device or of its node, in words; empty if there is none."""
    capacity = ledger[name]
    node, device, holders = capacity.node, capacity.device, capacity.holders
    if len(holders) > 1 and capacity.multi_device_jobs:
        holder, count = next((holder, count) for holder, count in holders.items() if count > 1)
        return (
            f"{name} would be shared with {holder!r}, which holds {count} devices; a job of several devices has each "
            "to itself"
        )
    if capacity.compute < -_ROUNDING:
        compute = device.capacity - capacity.compute
        return f"the jobs on {name} would take {compute:.6g} of its {device.capacity:.6g} compute"
    if capacity.memory < 0:
        return f"the jobs on {name} would take {device.memory - capacity.memory} of its {device.memory} bytes"
    free = ledger.cores(node.name)
    if free < -_ROUNDING:
        return f"the jobs on node {node.name} would take {node.cores - free:.6g} of its {node.cores:.6g} cores"
    return ""


def _check_refusals(plan: Plan, unplaced: set[str]) -> None:
    """Check that every job without a device, and no other job, has exactly one refusal with a reason."""
    refused: set[str] = set()
    for refusal in plan.refusals:
        if refusal.job not in unplaced:
            raise PolicyError(f"{refusal} names a job that is not waiting after the plan")
        if refusal.job in refused:
            raise PolicyError(f"{refusal} is the second refusal of this job; give one")
        if not refusal.reason.strip():
            raise PolicyError(f"{refusal} has no reason; say what the job waits for")
        refused.add(refusal.job)
    if missing := sorted(unplaced - refused):
        raise PolicyError(f"job {missing[0]!r} neither runs nor is refused; every other job needs a refusal")


@dataclass(frozen=True)
class FeasiblePlan:
    """The part of a plan that can be done at once, and id of each job that it places but that must wait -> reason."""

    actions: tuple[Action, ...]
    deferred: dict[str, str]


def feasible(plan: Plan, jobs: Sequence[JobView], cluster: Cluster, leaving: Collection[str]) -> FeasiblePlan:
    """Split a plan into actions that are feasible at once and jobs that must wait.

    A live job leaves a device only at its next step, and keeps its resources until then. So a job that is to get
    these resources waits for the next plan, which is made once they are free; no device or node is ever overfull.
    A job that keeps its first device is not moved, but gives back others and gets further ones.
    """
    views = {job.id: job for job in jobs}
    ledger = _ledger(plan, jobs, cluster)
    vacating = {name: job.id for job in jobs if job.id in leaving for name in job.devices}
    actions: list[Action] = []
    deferred: dict[str, str] = {}
    for action in plan.actions:
        before = views[action.job]
        if isinstance(action, (Suspend, Stop)) or _moves(action, before):
            vacating.update(dict.fromkeys(before.devices, before.id))
            actions.append(action)
            continue
        given_back = tuple(x for x in before.devices if x not in action.devices and x in cluster.places)
        holds = (*action.devices, *given_back)
        after = replace(before, state=JobState.RUNNING, devices=holds, share=action.share)
        if name := next(filter(vacating.get, [x for x in action.devices if x not in before.devices]), None):
            if before.state is not JobState.RUNNING:
                deferred[action.job] = f"waits until {vacating[name]} has left {name}"
            continue
        ledger.release(before.id)
        ledger.hold(after)
        checked = holds if _takes_more(before, before.after(action), cluster.places) else ()
        if excess_text := next(filter(None, (_excess_text(ledger, name) for name in checked)), ""):
            ledger.release(after.id)
            ledger.hold(before)
            if before.state is not JobState.RUNNING:
                deferred[action.job] = f"waits until others have left their devices: {excess_text}"
            continue
        views[action.job] = after
        vacating.update(dict.fromkeys(given_back, before.id))
        actions.append(action)
    return FeasiblePlan(tuple(actions), deferred)


def _moves(action: Start | Resume | Resize, job: JobView) -> bool:
    """Return whether the action takes a running job from its first device, which it must leave before."""
    return isinstance(action, Resize) and action.devices[0] != job.devices[0]
