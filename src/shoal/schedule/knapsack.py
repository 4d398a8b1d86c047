"""Knapsack policies: greedy packing of jobs onto devices (HyperSack, section 3), and one job per device in order."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heapreplace
from typing import ClassVar, final

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.schedule.base import JobState, JobView, Plan, Policy, Resume, Start
from shoal.schedule.indexed_queue import Entry, IndexedQueue
from shoal.schedule.refusals import Refusals

__all__ = ["FF", "FFD", "WF", "WFD", "DeviceOrder", "Fifo", "JobOrder", "Knapsack"]

_UNIT = 10**9
"""Compute and cores are integers in billionths, so that sums are exact and independent of their order."""

_CLOSED = -1
"""Compute that a device offers if it admits no other job, not even one without compute."""


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


class Knapsack(Policy):
    """Places jobs one after another on a device with room; a subclass sets the order of jobs and devices.

    Compute may be committed up to the capacity of a device; its memory and the cores of its node are hard limits. A job
    that fits nowhere waits, and does not block later jobs. Running jobs stay where they are; a suspended job
    is placed like a waiting one.
    """

    jobs: ClassVar[JobOrder]
    """Order of jobs: by expected seconds on the fastest kind of device, or by age; the older job wins a tie."""
    devices: ClassVar[DeviceOrder]
    """Order of devices: by remaining compute, or as in the cluster; the first device wins a tie."""
    exclusive: ClassVar[bool] = False
    """Whether a device holds one job at a time."""

    @final
    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        packing = _BinPacking(cluster, self.jobs, self.devices, exclusive=self.exclusive)
        actions = tuple(packing.place(jobs))
        waiting = sum(job.state is not JobState.RUNNING for job in jobs) - len(actions)
        return Plan(actions, Refusals(waiting, lambda: jobs, actions, cluster, exclusive=self.exclusive))


@final
class FF(Knapsack):
    """First fit: place the oldest job first, each on the first device with room."""

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.FIRST_FIT


@final
class FFD(Knapsack):
    """First fit decreasing: place the longest job first, each on the first device with room."""

    jobs = JobOrder.LONGEST
    devices = DeviceOrder.FIRST_FIT


@final
class WF(Knapsack):
    """Worst fit: place the oldest job first, each on the device with the most remaining compute."""

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.WORST_FIT


@final
class WFD(Knapsack):
    """Worst fit decreasing: place the longest job first, each on the device with the most remaining compute."""

    jobs = JobOrder.LONGEST
    devices = DeviceOrder.WORST_FIT


@final
class Fifo(Knapsack):
    """First in, first out: place the oldest job first, each alone on the first idle device with room.

    This is the baseline of HyperSack, without sharing. A job that fits no idle device does not block later jobs,
    since trials do not depend on each other.
    """

    jobs = JobOrder.OLDEST
    devices = DeviceOrder.FIRST_FIT
    exclusive = True


@dataclass(eq=False, slots=True)
class _NodeBins:
    """A node with its remaining cores."""

    cores: int


@dataclass(eq=False, slots=True)
class _DeviceBin:
    """A healthy device with its remaining resources, and its entry in the queue of its kind."""

    name: str
    kind: str
    position: int
    node_bins: _NodeBins
    compute: int
    memory: int
    jobs: int = 0
    has_multi_device_job: bool = False
    entry: Entry["_DeviceBin"] = field(init=False)


_Need = tuple[str, int, int, int]
"""Kind of device, compute, memory and cores."""


@dataclass(eq=False, slots=True)
class _JobQueue:
    """Waiting jobs with the same demand object, so that one check decides whether they fit, with their arrivals."""

    rank: float
    needs: tuple[_Need, ...]
    jobs: deque[tuple[int, JobView]] = field(default_factory=deque)


class _BinPacking:
    """Remaining compute, memory and cores of a cluster while jobs are placed."""

    def __init__(
        self, cluster: Cluster, job_order: JobOrder, device_order: DeviceOrder, *, exclusive: bool = False
    ) -> None:
        self._job_order = int(job_order)
        self._device_order = int(device_order)
        self._exclusive = exclusive
        self._places: dict[str, tuple[Device, _NodeBins, _DeviceBin | None]] = {}
        entries_by_kind: dict[str, list[Entry[_DeviceBin]]] = {}
        for node in cluster.nodes:
            node_bins = _NodeBins(round(node.cores * _UNIT))
            for device in node.devices:
                device_bin = None
                if device.healthy:
                    capacity = round(device.capacity * _UNIT)
                    device_bin = _DeviceBin(
                        device.name, device.kind, len(self._places), node_bins, capacity, device.memory
                    )
                    entries_by_kind.setdefault(device.kind, []).append(self._new_entry(device_bin))
                self._places[device.name] = (device, node_bins, device_bin)
        sorted_by_compute = device_order is DeviceOrder.WORST_FIT
        self._devices = {
            kind: IndexedQueue(entries, sorted_by_compute=sorted_by_compute)
            for kind, entries in entries_by_kind.items()
        }

    def place(self, jobs: Sequence[JobView]) -> list[Start | Resume]:
        """Place every waiting or suspended job that fits beside the running ones, in order; the jobs come oldest first.

        Nothing is freed meanwhile, so a queue whose first job fits nowhere is done.
        """
        order = [(each.rank, each.jobs[0][0], each) for each in self._queues(jobs)]
        heapify(order)
        actions: list[Start | Resume] = []
        while order:
            job_queue = order[0][2]
            device_bin = self._take_first(job_queue)
            if device_bin is None:
                heappop(order)
                continue
            _, job = job_queue.jobs.popleft()
            actions.append((Resume if job.state is JobState.SUSPENDED else Start)(job.id, (device_bin.name,)))
            if job_queue.jobs:
                heapreplace(order, (job_queue.rank, job_queue.jobs[0][0], job_queue))
            else:
                heappop(order)
        return actions

    def _queues(self, jobs: Sequence[JobView]) -> list[_JobQueue]:
        """Charge the devices of running jobs, and return queues of all others."""
        running, queues = JobState.RUNNING, dict[int, _JobQueue]()
        for arrival, job in enumerate(jobs):
            if job.state is running:
                self._charge(job)
                continue
            job_queue = queues.get(id(job.demand))
            if job_queue is None:
                job_queue = queues[id(job.demand)] = self._new_queue(job.demand)
            job_queue.jobs.append((arrival, job))
        return list(queues.values())

    def _charge(self, job: JobView) -> None:
        for name in job.devices:
            if name not in self._places:
                continue
            device, node_bins, device_bin = self._places[name]
            demand = job.demand[device.kind]
            node_bins.cores -= round(demand.cores * _UNIT)
            if device_bin is not None:
                device_bin.has_multi_device_job |= len(job.devices) > 1
                self._reduce(device_bin, round(job.compute(device) * _UNIT), demand.memory)

    def _new_queue(self, demand: Mapping[str, Demand]) -> _JobQueue:
        here = [(kind, ask) for kind, ask in demand.items() if kind in self._devices]
        seconds = min([ask.seconds for _, ask in here], default=0.0)
        needs = tuple([(kind, round(ask.compute * _UNIT), ask.memory, round(ask.cores * _UNIT)) for kind, ask in here])
        return _JobQueue(self._job_order * seconds, needs)

    def _take_first(self, job_queue: _JobQueue) -> _DeviceBin | None:
        """Reduce the first device in order on which the jobs of a queue fit; None if there is none."""
        best: tuple[Entry[_DeviceBin], _Need] | None = None
        for need in job_queue.needs:
            entry = self._fitting(need)
            if entry is not None and (best is None or entry < best[0]):
                best = entry, need
        if best is None:
            return None
        device_bin, (_, compute, memory, cores) = best[0][5], best[1]
        device_bin.node_bins.cores -= cores
        self._reduce(device_bin, compute, memory)
        return device_bin

    def _reduce(self, device_bin: _DeviceBin, compute: int, memory: int) -> None:
        device_bin.compute -= compute
        device_bin.memory -= memory
        device_bin.jobs += 1
        self._reindex(device_bin)

    def _fitting(self, need: _Need) -> Entry[_DeviceBin] | None:
        kind, compute, memory, cores = need
        queue = self._devices[kind]
        entry = queue.first(-compute, -memory, -cores)
        while entry is not None and entry[5].node_bins.cores < cores:  # jobs on other devices of the node took cores
            self._reindex(entry[5])
            entry = queue.first(-compute, -memory, -cores)
        return entry

    def _reindex(self, device_bin: _DeviceBin) -> None:
        """Update the entry of a device in its queue."""
        before = device_bin.entry
        self._devices[device_bin.kind].replace(before, self._new_entry(device_bin))

    def _new_entry(self, device_bin: _DeviceBin) -> Entry[_DeviceBin]:
        """Return the entry of a device in its queue: its offers count, negated, as requests."""
        is_closed = device_bin.has_multi_device_job or (self._exclusive and device_bin.jobs)
        offered_compute = _CLOSED if is_closed else device_bin.compute
        device_bin.entry = entry = (
            self._device_order * offered_compute,
            device_bin.position,
            -offered_compute,
            -device_bin.memory,
            -device_bin.node_bins.cores,
            device_bin,
        )
        return entry
