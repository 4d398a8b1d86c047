"""Why jobs wait: the reasons of those that fit nowhere, in words a person can act on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import overload

from shoal.core.device import Cluster, Device, Node
from shoal.core.resources import ROUNDING, Capacity, Ledger, bytes_text, no_device
from shoal.plan.schedule.base import JobState, JobView, Refusal, Resume, Start

__all__ = [
    "Refusals",
    "fits_empty_device",
    "refusal",
    "start_or_resume",
]


def refusal(job: JobView, ledger: Ledger) -> Refusal:
    """Return the refusal of a job that fits nowhere now."""
    return Refusal(job.id, _reason(job, ledger, _alike(ledger)))


def _alike(ledger: Ledger) -> list[tuple[Capacity, int]]:
    """Return the first of healthy devices that are alike in all that a reason depends on, and their number."""
    found: dict[object, tuple[Capacity, int]] = {}
    for each in ledger.capacities:
        device, node = each.device, each.node
        free = each.compute, each.memory, ledger.cores(node.name), ledger.is_closed(each)
        place = device.kind, device.memory, device.capacity, device.note, node.cores, free
        first, count = found.get(place, (each, 0))
        found[place] = first, count + 1
    return list(found.values())


def _reason(job: JobView, ledger: Ledger, alike: Sequence[tuple[Capacity, int]]) -> str:
    if not alike:
        return no_device(ledger.cluster)
    candidates = [capacity for capacity, _ in alike if capacity.device.kind in job.demand]
    if not candidates:
        kinds_here = sorted({capacity.device.kind for capacity, _ in alike})
        kinds = _joined_kinds(sorted(job.demand))
        return f"can never run here: it runs on {kinds}, the devices are {_joined_kinds(kinds_here)}"
    possible = [each for each in alike if fits_empty_device(each[0].node, each[0].device, job)]
    if not possible:
        largest = max(candidates, key=lambda capacity: capacity.device.memory)
        noted = [
            capacity
            for capacity in candidates
            if capacity.device.note and job.demand[capacity.device.kind].memory > capacity.memory
        ]
        if noted:
            return _shortage_text(job, max(noted, key=lambda capacity: capacity.memory), ledger)
        return f"can never run here: {_excess_text(job, largest)}"
    open_capacities = [capacity for capacity, _ in possible if not _is_busy(job, capacity, ledger)]
    if not open_capacities:
        return _busy_text(possible, len(ledger.capacities))
    return _shortage_text(job, max(open_capacities, key=lambda capacity: capacity.memory), ledger)


def _is_busy(job: JobView, capacity: Capacity, ledger: Ledger) -> bool:
    """Return whether the compute of the device, or its only place, is taken."""
    return ledger.is_closed(capacity) or job.demand[capacity.device.kind].compute > capacity.compute + ROUNDING


def _shortage_text(job: JobView, capacity: Capacity, ledger: Ledger) -> str:
    demand = job.demand[capacity.device.kind]
    if demand.memory > capacity.memory:
        free_memory, note = bytes_text(max(0, capacity.memory)), capacity.device.note
        note_text = f": {note}" if note else ""
        return f"needs {bytes_text(demand.memory)}, {capacity.device.name} has {free_memory} free{note_text}"
    free = max(0.0, ledger.cores(capacity.node.name))
    return f"needs {demand.cores:.3g} CPU cores, node {capacity.node.name} has {free:.3g} free"


class Refusals(Sequence[Refusal]):
    """The refusals of all jobs that a plan leaves waiting or suspended, oldest first; computed on first access.

    Jobs with the same demand object get the same reason, unless the policy names another.

    Args:
        actions: Actions of the plan, each of which starts or resumes a job on one device.
        waits: Id of a job that fits somewhere now -> reason for which it waits.
    """

    def __init__(
        self,
        count: int,
        jobs: Callable[[], Sequence[JobView]],
        actions: Sequence[Start | Resume],
        cluster: Cluster,
        *,
        exclusive: bool = False,
        waits: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._waits = waits
        self._count = count
        self._jobs = jobs
        self._actions = actions
        self._cluster = cluster
        self._exclusive = exclusive

    @cached_property
    def _computed(self) -> tuple[Refusal, ...]:
        jobs = self._jobs()
        ledger = Ledger(self._cluster, jobs, exclusive=self._exclusive)
        placed = {action.job: ledger[action.devices[0]] for action in self._actions}
        waiting: list[JobView] = []
        for job in jobs:
            if job.id in placed:
                ledger.take(job, placed[job.id])
            elif job.state is not JobState.RUNNING:
                waiting.append(job)
        job_of_demand = {id(job.demand): job for job in waiting if job.id not in self._waits}
        alike = _alike(ledger)
        reasons = {demand: _reason(job, ledger, alike) for demand, job in job_of_demand.items()}
        return tuple(Refusal(job.id, self._waits.get(job.id) or reasons[id(job.demand)]) for job in waiting)

    @overload
    def __getitem__(self, index: int) -> Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Refusal]: ...
    def __getitem__(self, index: int | slice) -> Refusal | Sequence[Refusal]:
        return self._computed[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Refusal]:
        return iter(self._computed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list, Refusals)):
            return NotImplemented
        return self._computed == tuple(other)

    def __hash__(self) -> int:
        return hash(self._computed)

    def __repr__(self) -> str:
        return repr(self._computed)


def start_or_resume(job: JobView, capacity: Capacity) -> Start | Resume:
    """Return the action that starts a waiting job, or resumes a suspended one, on a device."""
    kind = Resume if job.state is JobState.SUSPENDED else Start
    return kind(job.id, (capacity.device.name,))


def fits_empty_device(node: Node, device: Device, job: JobView) -> bool:
    """Return whether the job fits on the empty device."""
    demand = job.demand.get(device.kind)
    return (
        demand is not None
        and demand.compute <= device.capacity + ROUNDING
        and demand.memory <= device.memory
        and demand.cores <= node.cores + ROUNDING
    )


def _excess_text(job: JobView, capacity: Capacity) -> str:
    """Return the text of what a job needs and an empty device, or its node, does not have."""
    demand, device, node = job.demand[capacity.device.kind], capacity.device, capacity.node
    if demand.memory > device.memory:
        return f"needs {bytes_text(demand.memory)}, the largest device {device.name} has {bytes_text(device.memory)}"
    if demand.compute > device.capacity + ROUNDING:
        return f"needs {demand.compute:.3g} of a device's compute, {device.name} offers {device.capacity:.3g}"
    return f"needs {demand.cores:.3g} CPU cores, node {node.name} has {node.cores:.3g}"


def _busy_text(possible: Sequence[tuple[Capacity, int]], healthy: int) -> str:
    devices = sum(count for _, count in possible)
    if devices == 1:
        return f"waits for a free device: {possible[0][0].device.name} is busy"
    which = f"all {devices}" if devices == healthy else f"all {devices} that can hold it"
    return f"waits for a free device: {which} are busy"


def _joined_kinds(kinds: Sequence[str]) -> str:
    return " and ".join(kinds) if kinds else "no device"
