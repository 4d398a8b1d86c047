"""Incremental bin packing for the knapsack policies: remaining resources of devices, and lines of waiting jobs."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.schedule.action import JobState
from shoal.schedule.base import JobView
from shoal.schedule.indexed_queue import Entry, IndexedQueue

__all__ = ["UNIT", "BinPacking", "Charge", "DeviceBin", "DeviceOrder", "JobOrder", "Numbered", "Placed"]

UNIT = 10**9
"""Compute and cores are integers in billionths, so that sums are exact and independent of their order."""

_CLOSED = -1
"""Compute offered by a device that no other job may join, not even a job without compute."""

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
    """Order of devices with room; the value multiplies their remaining compute."""

    WORST_FIT = -1
    FIRST_FIT = 0
    BEST_FIT = 1


@dataclass(eq=False, slots=True)
class _NodeBins:
    """A node: its remaining cores, and its healthy devices."""

    cores: int
    slots: list["DeviceBin"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class DeviceBin:
    """A healthy device with its remaining resources.

    Args:
        devices: Name of the device, as a tuple for actions.
        kind: Kind of the device.
        position: Place in the cluster, which breaks ties.
        host: Node of the device.
        compute: Remaining compute.
        memory: Free bytes.
        jobs: Number of jobs on the device.
        whole: Number of jobs that also hold other devices; such a device admits no other job.
        entry: Entry in the queue of its kind.
    """

    devices: tuple[str]
    kind: str
    position: int
    host: _NodeBins
    compute: int
    memory: int
    jobs: int = 0
    whole: int = 0
    entry: Entry["DeviceBin"] = field(init=False)


@dataclass(eq=False, slots=True)
class _Line:
    """Waiting jobs with the same demand object, so that room is checked once for all of them.

    Args:
        demand: Demand of the jobs.
        rank: The lowest rank is placed first; the older job wins a tie.
        needs: Resources of a job on each kind of device in the cluster.
        jobs: The jobs, the oldest last.
        entries: Entries in the queues of its kinds, if the line fits nowhere.
    """

    demand: Mapping[str, Demand]
    rank: float
    needs: tuple[_Need, ...]
    jobs: list[Numbered] = field(default_factory=list)
    entries: tuple[Entry["_Line"], ...] = ()


class Charge(NamedTuple):
    """Resources of a job: a device (None if unhealthy), its node, and the compute, memory and cores taken of them."""

    slot: DeviceBin | None
    host: _NodeBins
    compute: int
    memory: int
    cores: int
    whole: bool = False


Placed = tuple[Numbered, DeviceBin, _Need]
"""A placed job, its device and its resources there; a plain tuple, since there are many."""


class BinPacking:
    """Remaining compute, memory and cores of a cluster, and the lines of waiting jobs.

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
        self._lines: dict[int, _Line] = {}
        self._untried: list[_Line] = []
        self._freed: dict[int, DeviceBin] = {}
        standing: dict[str, list[Entry[DeviceBin]]] = {}
        for node in cluster.nodes:
            host = _NodeBins(round(node.cores * UNIT))
            for device in node.devices:
                slot = None
                if device.healthy:
                    capacity = round(device.capacity * UNIT)
                    slot = DeviceBin((device.name,), device.kind, len(self._places), host, capacity, device.memory)
                    host.slots.append(slot)
                    standing.setdefault(device.kind, []).append(self._stand(slot))
                self._places[device.name] = (device, host, slot)
        rising = device_order is DeviceOrder.WORST_FIT
        self._devices = {kind: IndexedQueue(entries, rising=rising) for kind, entries in standing.items()}
        self._settled: dict[str, IndexedQueue[_Line]] = {kind: IndexedQueue() for kind in standing}

    def load(self, jobs: Iterable[Numbered]) -> None:
        """Charge the devices of running jobs, and line up all others; called once, with the oldest job first."""
        running, lines = JobState.RUNNING, self._lines
        for numbered in jobs:
            job = numbered[1]
            if job.state is running:
                for charge in self.charges(job):
                    self.take(charge)
                continue
            line = lines.get(id(job.demand)) or self._open(job.demand)
            line.jobs.append(numbered)
            self.waiting += 1
        for line in lines.values():
            line.jobs.reverse()

    def charges(self, job: JobView) -> tuple[Charge, ...]:
        """Resources that a job holds, without removed devices."""
        held = []
        for name in job.devices:
            if name in self._places:
                device, host, slot = self._places[name]
                demand = job.demand[device.kind]
                compute, cores = round(job.compute(device) * UNIT), round(demand.cores * UNIT)
                held.append(Charge(slot, host, compute, demand.memory, cores, len(job.devices) > 1))
        return tuple(held)

    def charge(self, placed: Placed) -> Charge:
        """Resources of a job that `decide` placed."""
        _, slot, (_, compute, memory, cores) = placed
        return Charge(slot, slot.host, compute, memory, cores)

    def take(self, charge: Charge) -> None:
        """Reduce the remaining resources."""
        slot, host, compute, memory, cores, whole = charge
        host.cores -= cores
        if slot is not None:
            slot.whole += whole
            self._reduce(slot, compute, memory)

    def free(self, charge: Charge) -> None:
        """Undo `take`; waiting jobs may fit on the freed devices."""
        slot, host, compute, memory, cores, whole = charge
        host.cores += cores
        if slot is not None:
            slot.compute += compute
            slot.memory += memory
            slot.jobs -= 1
            slot.whole -= whole
        for freed in host.slots if cores else (slot,) if slot else ():
            self._move(freed)
            self._freed[freed.position] = freed

    def join(self, numbered: Numbered) -> None:
        """Add a job to its line."""
        demand = numbered[1].demand
        line = self._lines.get(id(demand)) or self._open(demand)
        insort(line.jobs, numbered, key=_number)
        self.waiting += 1
        if line.entries:
            self._settle(line)

    def leave(self, numbered: Numbered) -> None:
        """Remove a job, in the view that was added, from its line."""
        line = self._lines[id(numbered[1].demand)]
        del line.jobs[bisect_left(line.jobs, numbered[0], key=_number)]
        self.waiting -= 1
        self._close_or_settle(line)

    def decide(self) -> list[Placed]:
        """Place and charge every job that fits, in order."""
        placed: list[Placed] = []
        queue = [_turn(line) for line in self._untried if line.jobs]
        queue.sort()
        calling = self._calling()
        self._untried = []
        while queue or calling:
            if calling and (not queue or calling[0][:2] < (-queue[-1][0], -queue[-1][1])):
                rank, arrival, _, slot = calling[0]
                wanted = self._wanted(slot)
                if wanted is None:
                    heappop(calling)
                elif wanted[:2] != (rank, arrival):
                    heapreplace(calling, (*wanted[:2], slot.position, slot))
                else:
                    found = self._place(wanted[5])
                    assert found is not None, f"a job that fits on {slot.devices[0]} was not placed"
                    placed.append(found)
                    self._close_or_settle(wanted[5])
                continue
            line = queue.pop()[2]
            found = self._place(line)
            if found is None:
                self._untried.append(line)
                continue
            placed.append(found)
            if line.jobs:
                insort(queue, _turn(line))
            else:
                del self._lines[id(line.demand)]
        return placed

    def settle(self) -> None:
        """After a decision, mark the lines that it could not place as fitting nowhere."""
        if self._untried:
            self._settle(*self._untried)
        self._untried = []

    def _open(self, demand: Mapping[str, Demand]) -> _Line:
        """A new line for jobs of this demand, identified by the identity of the mapping."""
        here = [(kind, ask) for kind, ask in demand.items() if kind in self._devices]
        seconds = min([ask.seconds for _, ask in here], default=0.0)
        needs = tuple([(kind, round(ask.compute * UNIT), ask.memory, round(ask.cores * UNIT)) for kind, ask in here])
        line = _Line(demand, self._job_order * seconds, needs)
        self._lines[id(demand)] = line
        self._untried.append(line)
        return line

    def _close_or_settle(self, line: _Line) -> None:
        """After a job has left its line: remove an empty line, or sort the line by its oldest job."""
        if line.entries:
            self._settle(line)
        if not line.jobs:
            del self._lines[id(line.demand)]

    def _settle(self, *lines: _Line) -> None:
        """Update the entries of lines in the queues; an empty line has none."""
        standing: dict[str, list[Entry[_Line]]] = {kind: [] for kind in self._settled}
        for line in lines:
            for need, entry in zip(line.needs, line.entries, strict=False):
                self._settled[need[0]].remove(entry)
            line.entries = ()
            if line.jobs:
                arrival = -line.jobs[-1][0]
                line.entries = tuple([(line.rank, arrival, *need[1:], line) for need in line.needs])
                for need, entry in zip(line.needs, line.entries, strict=True):
                    standing[need[0]].append(entry)
        for kind, entries in standing.items():
            self._settled[kind].extend(entries)

    def _calling(self) -> list[tuple[float, int, int, DeviceBin]]:
        """Heap of the freed devices, by rank and arrival of the first settled job that fits there."""
        calls = [(self._wanted(slot), slot) for slot in self._freed.values()]
        self._freed = {}
        heap = [(*wanted[:2], slot.position, slot) for wanted, slot in calls if wanted is not None]
        heapify(heap)
        return heap

    def _wanted(self, slot: DeviceBin) -> Entry[_Line] | None:
        """The first settled line whose jobs fit on a device."""
        return self._settled[slot.kind].first(-slot.entry[2], slot.memory, slot.host.cores)

    def _place(self, line: _Line) -> Placed | None:
        """Place the oldest job of a line on the first device in order with room; None if there is no room."""
        best: tuple[Entry[DeviceBin], _Need] | None = None
        for need in line.needs:
            entry = self._fitting(need)
            if entry is not None and (best is None or entry < best[0]):
                best = entry, need
        if best is None:
            return None
        slot, need = best[0][5], best[1]
        self.waiting -= 1
        slot.host.cores -= need[3]
        self._reduce(slot, need[1], need[2])
        return line.jobs.pop(), slot, need

    def _reduce(self, slot: DeviceBin, compute: int, memory: int) -> None:
        slot.compute -= compute
        slot.memory -= memory
        slot.jobs += 1
        self._move(slot)

    def _fitting(self, need: _Need) -> Entry[DeviceBin] | None:
        kind, compute, memory, cores = need
        queue = self._devices[kind]
        entry = queue.first(-compute, -memory, -cores)
        while entry is not None and entry[5].host.cores < cores:  # jobs on other devices of the node took cores
            self._move(entry[5])
            entry = queue.first(-compute, -memory, -cores)
        return entry

    def _move(self, slot: DeviceBin) -> None:
        """Update the entry of a device in its queue."""
        before = slot.entry
        self._devices[slot.kind].replace(before, self._stand(slot))

    def _stand(self, slot: DeviceBin) -> Entry[DeviceBin]:
        """The entry of a device in its queue: its offers count, negated, as requests."""
        offer = _CLOSED if slot.whole or (self._exclusive and slot.jobs) else slot.compute
        slot.entry = entry = (self._device_order * offer, slot.position, -offer, -slot.memory, -slot.host.cores, slot)
        return entry


def _turn(line: _Line) -> tuple[float, int, _Line]:
    """Sort key of lines, with the next line last."""
    return (-line.rank, line.jobs[-1][0], line)


def _number(numbered: Numbered) -> int:
    return numbered[0]
