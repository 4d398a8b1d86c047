"""Incremental bin packing for the knapsack policies: remaining resources of devices, and queues of waiting jobs."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.schedule.base import JobState, JobView
from shoal.schedule.indexed_queue import Entry, IndexedQueue

__all__ = ["UNIT", "BinPacking", "Charge", "DeviceBin", "DeviceOrder", "JobOrder", "Numbered", "Placed"]

UNIT = 10**9
"""Compute and cores are integers in billionths, so that sums are exact and independent of their order."""

_CLOSED = -1
"""Compute that a device offers if it admits no other job, not even one without compute."""

Numbered = tuple[int, JobView]
"""The negative number of earlier arrivals, and the job: the oldest job has the highest number."""

_Need = tuple[str, int, int, int]
"""Kind of device, compute, memory and cores."""


class JobOrder(IntEnum):
    """Order of jobs; the value multiplies the expected seconds on the fastest kind of device in the cluster."""

    LONGEST = -1
    OLDEST = 0
    SHORTEST = 1


class DeviceOrder(IntEnum):
    """Order of devices on which a job fits; the value multiplies their remaining compute."""

    WORST_FIT = -1
    FIRST_FIT = 0
    BEST_FIT = 1


@dataclass(eq=False, slots=True)
class _NodeBins:
    """A node: its remaining cores, and its healthy devices."""

    cores: int
    device_bins: list["DeviceBin"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class DeviceBin:
    """A healthy device with its remaining resources.

    Args:
        devices: Name of the device, as a tuple for actions.
        kind: Kind of the device.
        position: Place in the cluster, which breaks ties.
        node_bins: Node of the device.
        compute: Remaining compute.
        memory: Free bytes.
        jobs: Number of jobs on the device.
        multi_device_jobs: Number of jobs that also hold other devices; such a device admits no other job.
        entry: Entry in the queue of its kind.
    """

    devices: tuple[str]
    kind: str
    position: int
    node_bins: _NodeBins
    compute: int
    memory: int
    jobs: int = 0
    multi_device_jobs: int = 0
    entry: Entry["DeviceBin"] = field(init=False)


@dataclass(eq=False, slots=True)
class _JobQueue:
    """Waiting jobs with the same demand object, so that one check decides whether they fit."""

    demand: Mapping[str, Demand]
    rank: float
    needs: tuple[_Need, ...]
    jobs: list[Numbered] = field(default_factory=list)
    entries: tuple[Entry["_JobQueue"], ...] = ()


class Charge(NamedTuple):
    """Resources of a job: a device (None if unhealthy), its node, and the compute, memory and cores taken of them."""

    device_bin: DeviceBin | None
    node_bins: _NodeBins
    compute: int
    memory: int
    cores: int
    is_multi_device: bool = False


Placed = tuple[Numbered, DeviceBin, _Need]
"""A placed job, its device and its resources there; a plain tuple, since there are many."""


class BinPacking:
    """Remaining compute, memory and cores of a cluster, and queues of waiting jobs.

    A job that fitted nowhere can be placed only on a device with freed resources. So a decision checks only the new
    jobs and, for each freed device, the first jobs in order that fit there.

    Args:
        cluster: The current cluster.
        job_order: Order of jobs; the older job wins a tie.
        device_order: Order of devices; the first device in the cluster wins a tie.
        exclusive: Whether a device holds one job at a time.
    """

    def __init__(
        self, cluster: Cluster, job_order: JobOrder, device_order: DeviceOrder, *, exclusive: bool = False
    ) -> None:
        self.waiting = 0
        """Number of waiting jobs."""
        self._job_order = int(job_order)
        self._device_order = int(device_order)
        self._exclusive = exclusive
        self._places: dict[str, tuple[Device, _NodeBins, DeviceBin | None]] = {}
        self._job_queues: dict[int, _JobQueue] = {}
        self._untried: list[_JobQueue] = []
        self._freed: dict[int, DeviceBin] = {}
        entries_by_kind: dict[str, list[Entry[DeviceBin]]] = {}
        for node in cluster.nodes:
            node_bins = _NodeBins(round(node.cores * UNIT))
            for device in node.devices:
                device_bin = None
                if device.healthy:
                    capacity = round(device.capacity * UNIT)
                    device_bin = DeviceBin(
                        (device.name,), device.kind, len(self._places), node_bins, capacity, device.memory
                    )
                    node_bins.device_bins.append(device_bin)
                    entries_by_kind.setdefault(device.kind, []).append(self._new_entry(device_bin))
                self._places[device.name] = (device, node_bins, device_bin)
        sorted_by_compute = device_order is DeviceOrder.WORST_FIT
        self._devices = {
            kind: IndexedQueue(entries, sorted_by_compute=sorted_by_compute)
            for kind, entries in entries_by_kind.items()
        }
        self._unplaceable: dict[str, IndexedQueue[_JobQueue]] = {kind: IndexedQueue() for kind in entries_by_kind}

    def load(self, jobs: Iterable[Numbered]) -> None:
        """Charge the devices of running jobs, and queue all others. Call it once, with the oldest job first."""
        running, job_queues = JobState.RUNNING, self._job_queues
        for numbered in jobs:
            job = numbered[1]
            if job.state is running:
                for charge in self.charges(job):
                    self.take(charge)
                continue
            job_queue = job_queues.get(id(job.demand)) or self._open_queue(job.demand)
            job_queue.jobs.append(numbered)
            self.waiting += 1
        for job_queue in job_queues.values():
            job_queue.jobs.reverse()

    def charges(self, job: JobView) -> tuple[Charge, ...]:
        """Return the resources that a job holds, without removed devices."""
        held = []
        for name in job.devices:
            if name in self._places:
                device, node_bins, device_bin = self._places[name]
                demand = job.demand[device.kind]
                compute, cores = round(job.compute(device) * UNIT), round(demand.cores * UNIT)
                held.append(Charge(device_bin, node_bins, compute, demand.memory, cores, len(job.devices) > 1))
        return tuple(held)

    def charge(self, placed: Placed) -> Charge:
        """Return the resources of a job that `decide` placed."""
        _, device_bin, (_, compute, memory, cores) = placed
        return Charge(device_bin, device_bin.node_bins, compute, memory, cores)

    def take(self, charge: Charge) -> None:
        """Reduce the remaining resources."""
        device_bin, node_bins, compute, memory, cores, is_multi_device = charge
        node_bins.cores -= cores
        if device_bin is not None:
            device_bin.multi_device_jobs += is_multi_device
            self._reduce(device_bin, compute, memory)

    def free(self, charge: Charge) -> None:
        """Undo `take`; waiting jobs may fit on the freed devices."""
        device_bin, node_bins, compute, memory, cores, is_multi_device = charge
        node_bins.cores += cores
        if device_bin is not None:
            device_bin.compute += compute
            device_bin.memory += memory
            device_bin.jobs -= 1
            device_bin.multi_device_jobs -= is_multi_device
        for freed in node_bins.device_bins if cores else (device_bin,) if device_bin else ():
            self._reindex(freed)
            self._freed[freed.position] = freed

    def join(self, numbered: Numbered) -> None:
        """Add a job to its queue."""
        demand = numbered[1].demand
        job_queue = self._job_queues.get(id(demand)) or self._open_queue(demand)
        insort(job_queue.jobs, numbered, key=_number)
        self.waiting += 1
        if job_queue.entries:
            self._index_unplaceable(job_queue)

    def leave(self, numbered: Numbered) -> None:
        """Remove a job, given as the view that was added, from its queue."""
        job_queue = self._job_queues[id(numbered[1].demand)]
        del job_queue.jobs[bisect_left(job_queue.jobs, numbered[0], key=_number)]
        self.waiting -= 1
        self._update_queue(job_queue)

    def decide(self) -> list[Placed]:
        """Place and charge every job that fits, in order."""
        placed: list[Placed] = []
        queue = [_queue_key(job_queue) for job_queue in self._untried if job_queue.jobs]
        queue.sort()
        freed_heap = self._freed_heap()
        self._untried = []
        while queue or freed_heap:
            if freed_heap and (not queue or freed_heap[0][:2] < (-queue[-1][0], -queue[-1][1])):
                rank, arrival, _, device_bin = freed_heap[0]
                fit = self._first_fitting(device_bin)
                if fit is None:
                    heappop(freed_heap)
                elif fit[:2] != (rank, arrival):
                    heapreplace(freed_heap, (*fit[:2], device_bin.position, device_bin))
                else:
                    found = self._place(fit[5])
                    assert found is not None, f"a job that fits on {device_bin.devices[0]} was not placed"
                    placed.append(found)
                    self._update_queue(fit[5])
                continue
            job_queue = queue.pop()[2]
            found = self._place(job_queue)
            if found is None:
                self._untried.append(job_queue)
                continue
            placed.append(found)
            if job_queue.jobs:
                insort(queue, _queue_key(job_queue))
            else:
                del self._job_queues[id(job_queue.demand)]
        return placed

    def settle(self) -> None:
        """Index the queues that `decide` could not place, as fitting nowhere."""
        if self._untried:
            self._index_unplaceable(*self._untried)
        self._untried = []

    def _open_queue(self, demand: Mapping[str, Demand]) -> _JobQueue:
        """Return a new queue for jobs of this demand; the identity of the mapping identifies it."""
        here = [(kind, ask) for kind, ask in demand.items() if kind in self._devices]
        seconds = min([ask.seconds for _, ask in here], default=0.0)
        needs = tuple([(kind, round(ask.compute * UNIT), ask.memory, round(ask.cores * UNIT)) for kind, ask in here])
        job_queue = _JobQueue(demand, self._job_order * seconds, needs)
        self._job_queues[id(demand)] = job_queue
        self._untried.append(job_queue)
        return job_queue

    def _update_queue(self, job_queue: _JobQueue) -> None:
        """Update a queue that a job has left: remove it if it is empty, else rank it by its oldest job."""
        if job_queue.entries:
            self._index_unplaceable(job_queue)
        if not job_queue.jobs:
            del self._job_queues[id(job_queue.demand)]

    def _index_unplaceable(self, *job_queues: _JobQueue) -> None:
        """Update the entries of queues in the indexed queues; an empty queue has none."""
        entries_by_kind: dict[str, list[Entry[_JobQueue]]] = {kind: [] for kind in self._unplaceable}
        for job_queue in job_queues:
            for need, entry in zip(job_queue.needs, job_queue.entries, strict=False):
                self._unplaceable[need[0]].remove(entry)
            job_queue.entries = ()
            if job_queue.jobs:
                arrival = -job_queue.jobs[-1][0]
                job_queue.entries = tuple([(job_queue.rank, arrival, *need[1:], job_queue) for need in job_queue.needs])
                for need, entry in zip(job_queue.needs, job_queue.entries, strict=True):
                    entries_by_kind[need[0]].append(entry)
        for kind, entries in entries_by_kind.items():
            self._unplaceable[kind].extend(entries)

    def _freed_heap(self) -> list[tuple[float, int, int, DeviceBin]]:
        """Return the heap of the freed devices, by rank and arrival of the first waiting job that fits there."""
        first_fits = [(self._first_fitting(device_bin), device_bin) for device_bin in self._freed.values()]
        self._freed = {}
        heap = [(*fit[:2], device_bin.position, device_bin) for fit, device_bin in first_fits if fit is not None]
        heapify(heap)
        return heap

    def _first_fitting(self, device_bin: DeviceBin) -> Entry[_JobQueue] | None:
        """Return the first queue, of those that fitted nowhere, whose jobs fit on a device."""
        return self._unplaceable[device_bin.kind].first(
            -device_bin.entry[2], device_bin.memory, device_bin.node_bins.cores
        )

    def _place(self, job_queue: _JobQueue) -> Placed | None:
        """Place the oldest job of a queue on the first device in order on which it fits; None if there is none."""
        best: tuple[Entry[DeviceBin], _Need] | None = None
        for need in job_queue.needs:
            entry = self._fitting(need)
            if entry is not None and (best is None or entry < best[0]):
                best = entry, need
        if best is None:
            return None
        device_bin, need = best[0][5], best[1]
        self.waiting -= 1
        device_bin.node_bins.cores -= need[3]
        self._reduce(device_bin, need[1], need[2])
        return job_queue.jobs.pop(), device_bin, need

    def _reduce(self, device_bin: DeviceBin, compute: int, memory: int) -> None:
        device_bin.compute -= compute
        device_bin.memory -= memory
        device_bin.jobs += 1
        self._reindex(device_bin)

    def _fitting(self, need: _Need) -> Entry[DeviceBin] | None:
        kind, compute, memory, cores = need
        queue = self._devices[kind]
        entry = queue.first(-compute, -memory, -cores)
        while entry is not None and entry[5].node_bins.cores < cores:  # jobs on other devices of the node took cores
            self._reindex(entry[5])
            entry = queue.first(-compute, -memory, -cores)
        return entry

    def _reindex(self, device_bin: DeviceBin) -> None:
        """Update the entry of a device in its queue."""
        before = device_bin.entry
        self._devices[device_bin.kind].replace(before, self._new_entry(device_bin))

    def _new_entry(self, device_bin: DeviceBin) -> Entry[DeviceBin]:
        """Return the entry of a device in its queue: its offers count, negated, as requests."""
        offered_compute = (
            _CLOSED if device_bin.multi_device_jobs or (self._exclusive and device_bin.jobs) else device_bin.compute
        )
        device_bin.entry = entry = (
            self._device_order * offered_compute,
            device_bin.position,
            -offered_compute,
            -device_bin.memory,
            -device_bin.node_bins.cores,
            device_bin,
        )
        return entry


def _queue_key(job_queue: _JobQueue) -> tuple[float, int, _JobQueue]:
    """Return the sort key of queues, with the next queue last."""
    return (-job_queue.rank, job_queue.jobs[-1][0], job_queue)


def _number(numbered: Numbered) -> int:
    return numbered[0]
