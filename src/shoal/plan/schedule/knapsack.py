"""Knapsack policies: greedy packing of jobs onto devices (HyperSack, section 3), and one job per device in order."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heapreplace
from typing import ClassVar, Generic, TypeVar, final

from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.resources import Capacity, Ledger
from shoal.plan.schedule.base import JobState, JobView, Plan, Policy, Resume, Start
from shoal.plan.schedule.refusals import Refusals, start_or_resume

__all__ = ["FF", "FFD", "WF", "WFD", "DeviceOrder", "Entry", "Fifo", "IndexedQueue", "JobOrder", "Knapsack"]

_UNIT = 10**9
"""Compute and cores are compared in billionths, so that the order of additions does not matter."""

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
        ledger = Ledger(cluster, jobs, exclusive=self.exclusive)
        actions = tuple(_BinPacking(ledger, self.jobs, self.devices).place(jobs))
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


_Need = tuple[str, int, int, int]
"""Kind of device, compute, memory and cores."""


@dataclass(eq=False, slots=True)
class _JobQueue:
    """Waiting jobs with the same demand object, so that one check decides whether they fit, with their arrivals."""

    rank: float
    needs: tuple[_Need, ...]
    jobs: deque[tuple[int, JobView]] = field(default_factory=deque)


T = TypeVar("T")

Entry = tuple[float, int, int, int, int, T]
"""Rank, a unique number that breaks ties, requested compute, memory and cores, and the item."""

_BLOCK = 128
"""Initial number of entries of a block; a block is split at twice as many."""

_Amounts = tuple[float, float, float]

_NO_BOUND = (float("-inf"),) * 3
"""Lower bound of all amounts."""


class IndexedQueue(Generic[T]):
    """Entries in order of their rank; finds the first one whose requested amounts are within an offer.

    The entries are in blocks, each with a lower bound of its three amounts, so a search skips whole blocks. A bound may
    be too low after an entry was removed; the first search without a match in the block makes it exact. A block starts
    at the position of its initial first entry, which may have been removed.

    Args:
        sorted_by_compute: Whether the order is also that of requested compute, so that the first excess ends a search.
    """

    def __init__(self, entries: Iterable[Entry[T]] = (), *, sorted_by_compute: bool = False) -> None:
        self._sorted_by_compute = sorted_by_compute
        ordered = sorted(entries)
        self._blocks = [ordered[i : i + _BLOCK] for i in range(0, len(ordered), _BLOCK)] or [[]]
        self._bounds = [_lower_bound(block) for block in self._blocks]
        self._exact = [True] * len(self._blocks)
        self._starts = [block[0][:5] for block in self._blocks[1:]]

    def first(self, compute: int, memory: int, cores: int) -> Entry[T] | None:
        """Return the first entry with no amount above these; None if there is none."""
        for index, bound in enumerate(self._bounds):
            if bound[0] > compute or bound[1] > memory or bound[2] > cores:
                if self._sorted_by_compute and bound[0] > compute:
                    return None
                continue
            for entry in self._blocks[index]:
                if entry[2] <= compute and entry[3] <= memory and entry[4] <= cores:
                    return entry
            if not self._exact[index]:
                self._bounds[index] = _lower_bound(self._blocks[index])
                self._exact[index] = True
        return None

    def replace(self, entry: Entry[T], replacement: Entry[T]) -> None:
        """Remove an existing entry, and add another one."""
        if self._starts:
            self._remove(entry)
            self._add(replacement)
            return
        block = self._blocks[0]
        del block[bisect_left(block, entry)]
        insort(block, replacement)
        self._bounds[0] = _NO_BOUND
        self._exact[0] = False

    def _add(self, entry: Entry[T]) -> None:
        index = bisect_right(self._starts, entry) if self._starts else 0
        block = self._blocks[index]
        insort(block, entry)
        bound = self._bounds[index]
        if entry[2] < bound[0] or entry[3] < bound[1] or entry[4] < bound[2]:
            self._bounds[index] = (min(bound[0], entry[2]), min(bound[1], entry[3]), min(bound[2], entry[4]))
        if len(block) > 2 * _BLOCK:
            self._split(index)

    def _remove(self, entry: Entry[T]) -> None:
        index = bisect_right(self._starts, entry)
        block = self._blocks[index]
        del block[bisect_left(block, entry)]
        self._exact[index] = False
        if not block and self._starts:
            del self._blocks[index], self._bounds[index], self._exact[index], self._starts[max(index - 1, 0)]

    def _split(self, index: int) -> None:
        left, right = self._blocks[index][:_BLOCK], self._blocks[index][_BLOCK:]
        self._blocks[index : index + 1] = [left, right]
        self._bounds[index : index + 1] = [_lower_bound(left), _lower_bound(right)]
        self._exact[index : index + 1] = [True, True]
        self._starts.insert(index, right[0][:5])


def _lower_bound(block: list[Entry[T]]) -> _Amounts:
    """Return the least of each amount in a block; infinite in an empty one."""
    if not block:
        return (float("inf"),) * 3
    return (min(entry[2] for entry in block), min(entry[3] for entry in block), min(entry[4] for entry in block))


class _BinPacking:
    """A ledger of what is free while jobs are placed, its devices of each kind in order."""

    def __init__(self, ledger: Ledger, job_order: JobOrder, device_order: DeviceOrder) -> None:
        self._ledger = ledger
        self._job_order = int(job_order)
        self._device_order = int(device_order)
        self._entries = {each.position: self._new_entry(each) for each in ledger.capacities}
        of_kind: dict[str, list[Entry[Capacity]]] = {}
        for entry in self._entries.values():
            of_kind.setdefault(entry[5].device.kind, []).append(entry)
        by_compute = device_order is DeviceOrder.WORST_FIT
        self._devices = {kind: IndexedQueue(each, sorted_by_compute=by_compute) for kind, each in of_kind.items()}

    def place(self, jobs: Sequence[JobView]) -> list[Start | Resume]:
        """Place every waiting or suspended job that fits, in order; the jobs come oldest first.

        Nothing is freed meanwhile, so a queue whose first job fits nowhere is done.
        """
        order = [(each.rank, each.jobs[0][0], each) for each in self._queues(jobs)]
        heapify(order)
        actions: list[Start | Resume] = []
        while order:
            job_queue = order[0][2]
            capacity = self._first_fitting(job_queue.needs)
            if capacity is None:
                heappop(order)
                continue
            _, job = job_queue.jobs.popleft()
            self._ledger.take(job, capacity)
            self._reindex(capacity)
            actions.append(start_or_resume(job, capacity))
            if job_queue.jobs:
                heapreplace(order, (job_queue.rank, job_queue.jobs[0][0], job_queue))
            else:
                heappop(order)
        return actions

    def _queues(self, jobs: Sequence[JobView]) -> list[_JobQueue]:
        running, queues = JobState.RUNNING, dict[int, _JobQueue]()
        for arrival, job in enumerate(jobs):
            if job.state is running:
                continue
            job_queue = queues.get(id(job.demand))
            if job_queue is None:
                job_queue = queues[id(job.demand)] = self._new_queue(job.demand)
            job_queue.jobs.append((arrival, job))
        return list(queues.values())

    def _new_queue(self, demand: Mapping[str, Demand]) -> _JobQueue:
        here = [(kind, ask) for kind, ask in demand.items() if kind in self._devices]
        seconds = min([ask.seconds for _, ask in here], default=0.0)
        needs = tuple([(kind, round(ask.compute * _UNIT), ask.memory, round(ask.cores * _UNIT)) for kind, ask in here])
        return _JobQueue(self._job_order * seconds, needs)

    def _first_fitting(self, needs: Sequence[_Need]) -> Capacity | None:
        """Return the first device in order on which a job fits; None if there is none."""
        found = [entry for need in needs if (entry := self._fitting(need)) is not None]
        return min(found)[5] if found else None

    def _fitting(self, need: _Need) -> Entry[Capacity] | None:
        kind, compute, memory, cores = need
        queue = self._devices[kind]
        entry = queue.first(-compute, -memory, -cores)
        while entry is not None and self._free_cores(entry[5]) < cores:  # jobs on other devices of the node took cores
            self._reindex(entry[5])
            entry = queue.first(-compute, -memory, -cores)
        return entry

    def _reindex(self, capacity: Capacity) -> None:
        before = self._entries[capacity.position]
        entry = self._entries[capacity.position] = self._new_entry(capacity)
        self._devices[capacity.device.kind].replace(before, entry)

    def _new_entry(self, capacity: Capacity) -> Entry[Capacity]:
        """Return the entry of a device in its queue: what is free counts, negated, as requests."""
        compute = _CLOSED if self._ledger.is_closed(capacity) else round(capacity.compute * _UNIT)
        order = self._device_order * compute
        return order, capacity.position, -compute, -capacity.memory, -self._free_cores(capacity), capacity

    def _free_cores(self, capacity: Capacity) -> int:
        return round(self._ledger.cores(capacity.node.name) * _UNIT)
