"""Holds a plan against the rules of the `Policy` contract."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.cluster.device import Cluster, Device, Node
from shoal.errors import PolicyError
from shoal.schedule.base import Action, JobState, JobView, Plan, Resize, Resume, Start, Stop, Suspend

__all__ = ["check_plan"]

_ROUNDING = 1e-6


def check_plan(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> None:
    """Accept a legal plan.

    Actions are taken in order, so a job may use what an earlier action of the plan has freed. Limits are checked where
    an action places a job: devices that were too full before are not held against a plan that leaves them alone.

    Args:
        plan: what a policy returned.
        jobs: what it was given.
        cluster: what it was given.

    Raises:
        PolicyError: names the action and the rule or limit it breaks.
    """
    state = {job.id: job for job in jobs}
    places = {device.name: (node, device) for node, device in cluster}
    for action in plan.actions:
        job = _after(action, state.get(action.job), places)
        if isinstance(action, Stop):
            del state[job.id]
            continue
        state[job.id] = job
        for name in job.devices:
            _check_limits(action, places[name], state.values(), places)
    waiting = {job.id for job in jobs if job.state is JobState.WAITING}
    unplaced = {name for name in waiting if state[name].state is JobState.WAITING}
    _check_refusals(plan, unplaced)


def _after(action: Action, job: JobView | None, places: dict[str, tuple[Node, Device]]) -> JobView:
    """The job as the action leaves it."""
    if job is None:
        raise PolicyError(f"{action} names a job that does not exist")
    legal = {
        Start: (JobState.WAITING,),
        Suspend: (JobState.RUNNING,),
        Resume: (JobState.SUSPENDED,),
        Resize: (JobState.RUNNING,),
        Stop: (JobState.RUNNING, JobState.SUSPENDED),
    }[type(action)]
    if job.state not in legal:
        raise PolicyError(f"{action} names a job that is {job.state}; it must be {' or '.join(legal)}")
    match action:
        case Start(device=name) | Resume(device=name):
            devices: tuple[str, ...] = (name,)
        case Resize(devices=names):
            devices = names
        case Suspend() | Stop():
            return replace(job, state=JobState.SUSPENDED, devices=())
    if not devices or len(set(devices)) < len(devices):
        raise PolicyError(f"{action} must name at least one device, and none twice")
    for name in devices:
        _check_device(action, name, job, places)
    return replace(job, state=JobState.RUNNING, devices=devices)


def _check_device(action: Action, name: str, job: JobView, places: dict[str, tuple[Node, Device]]) -> None:
    if name not in places:
        raise PolicyError(f"{action} names a device that does not exist; there are {', '.join(places)}")
    _, device = places[name]
    if not device.healthy:
        raise PolicyError(f"{action} names a device that is not healthy")
    if device.kind not in job.demand:
        raise PolicyError(f"{action}: the job cannot run on {device.kind}, only on {', '.join(job.demand)}")


def _check_limits(
    action: Action, place: tuple[Node, Device], jobs: Iterable[JobView], places: dict[str, tuple[Node, Device]]
) -> None:
    """Sum the demands of all jobs on a device, and the cores of all jobs on its node."""
    node, device = place
    compute, memory, cores = 0.0, 0, 0.0
    for job in jobs:
        for name in job.devices:
            if name not in places or places[name][0] is not node:
                continue
            demand = job.demand[places[name][1].kind]
            cores += demand.cores
            if name == device.name:
                compute += demand.compute
                memory += demand.memory
    if compute > device.capacity + _ROUNDING:
        raise PolicyError(
            f"{action}: the jobs on {device.name} would take {compute:.6g} of its {device.capacity:.6g} compute"
        )
    if memory > device.memory:
        raise PolicyError(f"{action}: the jobs on {device.name} would take {memory} of its {device.memory} bytes")
    if cores > node.cores + _ROUNDING:
        raise PolicyError(
            f"{action}: the jobs on node {node.name} would take {cores:.6g} of its {node.cores:.6g} cores"
        )


def _check_refusals(plan: Plan, unplaced: set[str]) -> None:
    """Exactly one refusal, with a reason, for every job that still waits, and for no other."""
    refused: set[str] = set()
    for refusal in plan.refusals:
        if refusal.job not in unplaced:
            raise PolicyError(f"{refusal} names a job that is not waiting after the plan")
        if refusal.job in refused:
            raise PolicyError(f"{refusal} is the second refusal of this job; give one")
        if not refusal.reason.strip():
            raise PolicyError(f"{refusal} has no reason; say what the job waits for")
        refused.add(refusal.job)
    if forgotten := sorted(unplaced - refused):
        raise PolicyError(f"job {forgotten[0]!r} is neither started nor refused; every waiting job needs one of them")
