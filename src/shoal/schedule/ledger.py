"""Ledger of the remaining resources of a cluster while a plan is made, and the reasons of jobs that do not fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from shoal.core.device import Cluster, Device, Node
from shoal.schedule.action import JobState, Refusal, Resume, Start
from shoal.schedule.base import JobView

__all__ = ["ROUNDING", "Capacity", "Ledger", "Refusals", "begin", "bytes_text", "no_device"]

ROUNDING = 1e-9
"""Sums of compute, widths and cores may exceed their limit by this."""


@dataclass(eq=False)
class Capacity:
    """Remaining resources of one healthy device.

    Args:
        device: The device.
        node: Node of the device.
        position: Place in the cluster, which breaks ties.
        compute: Remaining compute.
        memory: Free bytes.
        jobs: Number of jobs on the device.
        whole: Whether one of them also holds other devices; the device then admits no other job.
    """

    device: Device
    node: Node
    position: int
    compute: float
    memory: int
    jobs: int = 0
    whole: bool = False


class Ledger:
    """Remaining compute and memory of every healthy device, and cores of every node.

    Args:
        cluster: The current cluster.
        jobs: All jobs; those that hold devices are charged.
        exclusive: Whether a device holds one job at a time.
    """

    def __init__(self, cluster: Cluster, jobs: Sequence[JobView], *, exclusive: bool = False) -> None:
        self.exclusive = exclusive
        self.rooms = tuple(
            Capacity(device, node, position, compute=device.capacity, memory=device.memory)
            for position, (node, device) in enumerate(cluster)
            if device.healthy
        )
        self._cluster = cluster
        self._cores = {node.name: node.cores for node in cluster.nodes}
        rooms = {room.device.name: room for room in self.rooms}
        for job in jobs:
            for name in job.devices:
                if name in rooms:
                    self.charge(job, rooms[name])
                elif name in cluster.places:
                    node, device = cluster.places[name]
                    self._cores[node.name] -= job.demand[device.kind].cores

    def fits(self, job: JobView, room: Capacity) -> bool:
        """Whether the job can start on the device now."""
        demand = job.demand.get(room.device.kind)
        return (
            demand is not None
            and not self._closed(room)
            and demand.compute <= room.compute + ROUNDING
            and demand.memory <= room.memory
            and demand.cores <= self._cores[room.node.name] + ROUNDING
        )

    def take(self, job: JobView, room: Capacity) -> None:
        """Place a waiting job on a device."""
        self.charge(replace(job, devices=(room.device.name,)), room)

    def charge(self, job: JobView, room: Capacity) -> None:
        """Charge a device, and its node, with the demand of a job that holds it."""
        demand = job.demand[room.device.kind]
        room.compute -= job.compute(room.device)
        room.memory -= demand.memory
        room.jobs += 1
        room.whole |= len(job.devices) > 1
        self._cores[room.node.name] -= demand.cores

    def cores(self, node: Node) -> float:
        """Free CPU cores of a node."""
        return self._cores[node.name]

    def refusal(self, job: JobView) -> Refusal:
        """Refusal of a job that fits nowhere now, with its reason."""
        return Refusal(job.id, self._reason(job))

    def _reason(self, job: JobView) -> str:
        if not self.rooms:
            return no_device(self._cluster)
        able = [room for room in self.rooms if room.device.kind in job.demand]
        if not able:
            here = sorted({room.device.kind for room in self.rooms})
            return f"can never run here: it runs on {_listed(sorted(job.demand))}, the devices are {_listed(here)}"
        possible = [room for room in able if _excess(job, room) == ""]
        if not possible:
            largest = max(able, key=lambda room: room.device.memory)
            crowded = [room for room in able if room.device.note and job.demand[room.device.kind].memory > room.memory]
            if crowded:
                return self._shortage(job, max(crowded, key=lambda room: room.memory))
            return f"can never run here: {_excess(job, largest)}"
        open_rooms = [room for room in possible if not self._busy(job, room)]
        if not open_rooms:
            return _wait_for(possible, len(self.rooms))
        return self._shortage(job, max(open_rooms, key=lambda room: room.memory))

    def _closed(self, room: Capacity) -> bool:
        """Whether the jobs on the device exclude another one."""
        return room.whole or (self.exclusive and room.jobs > 0)

    def _busy(self, job: JobView, room: Capacity) -> bool:
        """Whether the compute of the device, or its only place, is taken."""
        if self._closed(room):
            return True
        return job.demand[room.device.kind].compute > room.compute + ROUNDING

    def _shortage(self, job: JobView, room: Capacity) -> str:
        demand = job.demand[room.device.kind]
        if demand.memory > room.memory:
            free_memory, note = bytes_text(max(0, room.memory)), room.device.note
            why = f": {note}" if note else ""
            return f"needs {bytes_text(demand.memory)}, {room.device.name} has {free_memory} free{why}"
        free = max(0.0, self._cores[room.node.name])
        return f"needs {demand.cores:.3g} CPU cores, node {room.node.name} has {free:.3g} free"


class Refusals(Sequence[Refusal]):
    """The refusals of all jobs that a plan leaves waiting or suspended, oldest first; computed on first access.

    Jobs with the same demand object get the same reason.

    Args:
        count: Number of refusals.
        jobs: Source of all jobs given to the policy, oldest first.
        actions: Actions of the plan, each of which starts or resumes a job on one device.
        cluster: Cluster given to the policy.
        exclusive: Whether a device holds one job at a time.
    """

    def __init__(
        self,
        count: int,
        jobs: Callable[[], Sequence[JobView]],
        actions: Sequence[Start | Resume],
        cluster: Cluster,
        *,
        exclusive: bool = False,
    ) -> None:
        self._count = count
        self._jobs = jobs
        self._actions = actions
        self._cluster = cluster
        self._exclusive = exclusive

    @cached_property
    def _made(self) -> tuple[Refusal, ...]:
        jobs = self._jobs()
        ledger = Ledger(self._cluster, jobs, exclusive=self._exclusive)
        rooms = {room.device.name: room for room in ledger.rooms}
        begun = {action.job: rooms[action.devices[0]] for action in self._actions}
        waiting: list[JobView] = []
        for job in jobs:
            if job.id in begun:
                ledger.take(job, begun[job.id])
            elif job.state is not JobState.RUNNING:
                waiting.append(job)
        alike = {id(job.demand): job for job in waiting}
        reasons = {demand: ledger.refusal(job).reason for demand, job in alike.items()}
        return tuple(Refusal(job.id, reasons[id(job.demand)]) for job in waiting)

    @overload
    def __getitem__(self, index: int) -> Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Refusal]: ...
    def __getitem__(self, index: int | slice) -> Refusal | Sequence[Refusal]:
        return self._made[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Refusal]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list, Refusals)):
            return NotImplemented
        return self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)


def begin(job: JobView, room: Capacity) -> Start | Resume:
    """The action that starts a waiting job, or resumes a suspended one, on a device."""
    kind = Resume if job.state is JobState.SUSPENDED else Start
    return kind(job.id, (room.device.name,))


def no_device(cluster: Cluster) -> str:
    """Reason of all jobs without a healthy device, with the note of each device."""
    notes = ", ".join(f"{device.name} {device.note}" for _, device in cluster if device.note)
    return f"no healthy device: {notes}" if notes else "no healthy device"


def _excess(job: JobView, room: Capacity) -> str:
    """The demand of a job that exceeds an empty device or its node, in words; empty if the job would fit alone."""
    demand, device, node = job.demand[room.device.kind], room.device, room.node
    if demand.memory > device.memory:
        return f"needs {bytes_text(demand.memory)}, the largest device {device.name} has {bytes_text(device.memory)}"
    if demand.compute > device.capacity + ROUNDING:
        return f"needs {demand.compute:.3g} of a device's compute, {device.name} offers {device.capacity:.3g}"
    if demand.cores > node.cores + ROUNDING:
        return f"needs {demand.cores:.3g} CPU cores, node {node.name} has {node.cores:.3g}"
    return ""


def _wait_for(possible: Sequence[Capacity], healthy: int) -> str:
    if len(possible) == 1:
        return f"waits for a free device: {possible[0].device.name} is busy"
    which = f"all {len(possible)}" if len(possible) == healthy else f"all {len(possible)} that can hold it"
    return f"waits for a free device: {which} are busy"


def _listed(kinds: Sequence[str]) -> str:
    return " and ".join(kinds) if kinds else "no device"


def bytes_text(count: int) -> str:
    """Bytes as text in gigabytes or megabytes: 9.1 GB, 350 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
