"""What a simulation is given: jobs, where more of them come from, what happens to the cluster, who slows down whom."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import ScenarioError
from shoal.cost.scaling import Scaling

__all__ = ["ClusterEvent", "SimulatedJob", "SlowDown", "Source", "Tenant", "after", "never_fits", "sizes"]


@dataclass(frozen=True)
class SimulatedJob:
    """A job, and all that decides how long it takes.

    Args:
        id: unique in the simulation.
        demand: device kind -> what it takes there, `seconds` being those of the whole job, alone on a whole device.
        arrival: seconds from the start of the simulation.
        scaling: its run time by width.
        group: name of its TrialGroup, or None.
        curve: its training losses, one a step, the steps spread evenly over the job; empty: it reports none.
        target: a loss; when the curve first reaches it is measured.
        epoch: epochs that it has trained for before it begins.
        budget: epochs that it is to train for, in all; None if that is not known.
        preemptible: whether it may be suspended, resized or stopped.
        start_seconds: on its devices before the first step, at every start.
        switch_seconds: what suspending and resuming cost together; paid when it is resumed.
        checkpoint_every: seconds of training alone between two checkpoints; inf: it makes none.
        checkpoint_seconds: what one costs.
        workload: its row in the tables of a slow-down model; empty: it has none.
        study: that it belongs to, or None.

    Raises:
        ScenarioError: a time is negative or not finite, or the job demands nothing of any device.
    """

    id: str
    demand: Mapping[str, Demand]
    arrival: float = 0.0
    scaling: Scaling = field(default_factory=Scaling)
    group: str | None = None
    curve: Sequence[float] = ()
    target: float | None = None
    epoch: int = 0
    budget: int | None = None
    preemptible: bool = True
    start_seconds: float = 0.0
    switch_seconds: float = 0.0
    checkpoint_every: float = float("inf")
    checkpoint_seconds: float = 0.0
    workload: str = ""
    study: str | None = None

    def __post_init__(self) -> None:
        if not self.demand:
            raise ScenarioError(f"job {self.id!r} has no demand; say what it takes of one kind of device at least")
        for name in ("arrival", "start_seconds", "switch_seconds", "checkpoint_seconds"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ScenarioError(f"job {self.id!r}: `{name}` must be finite and not negative, got {value!r}")
        if not self.checkpoint_every > 0:
            raise ScenarioError(f"job {self.id!r}: `checkpoint_every` must be above 0, got {self.checkpoint_every!r}")

    @cached_property
    def goal(self) -> float:
        """Progress at which its loss first reaches the target; inf if it never does."""
        if self.target is None:
            return float("inf")
        step = next((step for step, loss in enumerate(self.curve, start=1) if loss <= self.target), None)
        return float("inf") if step is None else step / len(self.curve)

    @property
    def dilation(self) -> float:
        """How many times longer it takes because of its checkpoints."""
        return 1 + self.checkpoint_seconds / self.checkpoint_every


class Source(ABC):
    """Makes jobs while a simulation runs, such as a search whose next trials depend on the last ones' losses."""

    @abstractmethod
    def begin(self) -> Sequence[SimulatedJob]:
        """The first jobs, whose `arrival` says when; asked once."""

    @abstractmethod
    def ended(self, job: str, now: float) -> Sequence[SimulatedJob]:
        """The jobs that follow from the end of one of its own; they arrive at `now` or later."""


@dataclass(frozen=True)
class ClusterEvent:
    """Devices that come or go.

    Jobs on a device that fails or leaves wait again, at their last checkpoint.

    Args:
        at: seconds from the start of the simulation.
        failed: names of devices, or of nodes with all of theirs, that are unhealthy from now on.
        restored: names of devices or nodes that are healthy again.
        removed: names of nodes that leave the cluster.
        added: nodes that join it.
    """

    at: float
    failed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Tenant:
    """A job on a device, as a slow-down model sees it; for `share`, see `JobView`."""

    job: SimulatedJob
    share: float | None = None


class SlowDown(ABC):
    """How fast jobs are that share a device."""

    @abstractmethod
    def speeds(self, device: Device, tenants: Sequence[Tenant]) -> Sequence[float]:
        """Speed of each job as a fraction of its speed alone on the whole device, in the order of `tenants`.

        Called with every job that is on the device, whenever that changes; a job of several devices is not asked for.
        """


def after(cluster: Cluster, event: ClusterEvent) -> Cluster:
    """The cluster as an event leaves it.

    Raises:
        ScenarioError: the event names a node or device that is not there, or adds one that is.
    """
    nodes_here = {node.name for node in cluster.nodes}
    known = nodes_here | {device.name for _, device in cluster}
    for name in event.removed:
        if name in known - nodes_here:
            raise ScenarioError(f"event at {event.at:g} s: {name!r} is a device; only nodes are removed, devices fail")
    for name in (*event.failed, *event.restored, *event.removed):
        if name not in known:
            raise ScenarioError(
                f"event at {event.at:g} s: there is no node or device {name!r}, only {_listed(sorted(known))}"
            )
    stays = [node for node in cluster.nodes if node.name not in event.removed]
    nodes = [
        replace(node, devices=tuple(_after(device, {node.name, device.name}, event) for device in node.devices))
        for node in stays
    ]
    there = set(known)
    for node in event.added:
        for name in (node.name, *(device.name for device in node.devices)):
            if name in there:
                raise ScenarioError(
                    f"event at {event.at:g} s: there is or was a node or device {name!r} already; name the new one "
                    "otherwise, and let one that comes back fail and be restored"
                )
            there.add(name)
    return Cluster((*nodes, *event.added))


def _after(device: Device, names: set[str], event: ClusterEvent) -> Device:
    healthy = names.isdisjoint(event.failed) and (device.healthy or not names.isdisjoint(event.restored))
    return device if device.healthy == healthy else replace(device, healthy=healthy)


def sizes(cluster: Cluster) -> list[tuple[Node, Device]]:
    """One device of every size that a cluster has, with its node."""
    different = {
        (device.kind, device.memory, device.capacity, node.cores): (node, device)
        for node, device in reversed([*cluster])
    }
    return list(different.values())


def never_fits(job: SimulatedJob, places: Sequence[tuple[Node, Device]]) -> str | None:
    """Why a job cannot run on any of some devices, even alone; None if it can on one."""
    able = [place for place in places if place[1].kind in job.demand]
    if not able:
        here = sorted({device.kind for _, device in places})
        return f"it runs on {_listed(sorted(job.demand))}, the devices are {_listed(here)}"
    largest = max(able, key=lambda place: (place[1].memory, place[1].capacity, place[0].cores))
    return None if any(not _fault(job, *place) for place in able) else _fault(job, *largest)


def _fault(job: SimulatedJob, node: Node, device: Device) -> str:
    """What the job asks beyond the whole of a device and its node; empty if it fits there alone."""
    demand, largest = job.demand[device.kind], f"the largest device {device.name}"
    if demand.memory > device.memory:
        return f"needs {demand.memory / 1e9:.3g} GB, {largest} has {device.memory / 1e9:.3g} GB"
    elastic = job.scaling.sharing > 1
    if demand.compute > device.capacity and not elastic:
        return f"needs {demand.compute:.3g} of a device's compute, {largest} offers {device.capacity:.3g}"
    if demand.cores > node.cores:
        return f"needs {demand.cores:.3g} CPU cores, node {node.name} of {largest} has {node.cores:.3g}"
    return ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
