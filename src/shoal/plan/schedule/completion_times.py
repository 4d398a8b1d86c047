"""Expected ends of waiting jobs on the devices of a cluster, the wait for a busy device included."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Generic, NamedTuple, TypeVar

from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.resources import ROUNDING, Capacity, Ledger
from shoal.plan.schedule.base import JobView

__all__ = ["MIN_WAITING_GAIN", "CompletionTimes", "ExpectedStart"]

MIN_WAITING_GAIN = 0.1
"""Least saving, as a part of the time until a job would end on a free device, for which it waits for a faster one.
Estimates of run times miss by some percent, and the free device may stay idle meanwhile, so a wait must gain more."""

Rank = TypeVar("Rank", bound=tuple[float, ...])


class ExpectedStart(NamedTuple):
    """A device for a job, and the seconds until the job is expected to end there."""

    end: float
    capacity: Capacity


class _Hold(NamedTuple):
    """Resources that a job holds on a device, and the seconds until it is expected to release them."""

    end: float
    compute: float
    memory: int
    cores: float


@dataclass(eq=False)
class _DeviceHolds:
    """Jobs on a device, and jobs that wait for it, which count as if they held their resources from now on.

    The ends of those on it are as if nothing slowed them down; inf where the end is unknown.
    """

    running: list[_Hold] = field(default_factory=list)
    reserved: list[_Hold] = field(default_factory=list)


class _DeviceQueue(Generic[Rank]):
    """Devices in the order of a rank that only grows while a plan is made; so it is computed anew on access only.

    The last part of a rank is unique; a device whose rank is None is out for good.
    """

    def __init__(self, rank: Callable[[Capacity], Rank | None], capacities: Sequence[Capacity]) -> None:
        self._rank = rank
        ranked = [(rank(capacity), capacity) for capacity in capacities]
        self._heap = [(found, capacity) for found, capacity in ranked if found is not None]
        heapify(self._heap)

    def first(self) -> tuple[Rank, Capacity] | None:
        while self._heap:
            before, capacity = self._heap[0]
            rank = self._rank(capacity)
            if rank is None:
                heappop(self._heap)
            elif rank > before:
                heapreplace(self._heap, (rank, capacity))
            else:
                return rank, capacity
        return None


class CompletionTimes:
    """Expected ends of jobs while a plan is made (minimum completion time; O. H. Ibarra and C. E. Kim, 1977).

    - The expected time on a device is seconds · max(1, committed / compute), where the committed compute includes the
      demand of the job. The device with the most compute left wins a tie.
    - The jobs on a busy device are expected to end after their remaining seconds, slowed down by the compute that is
      committed there now. The end of a job without remaining seconds is unknown: it is overdue, or was not measured.
      No job waits for its resources.
    - A job that waits for a device is expected to hold its resources from now until its own end.
    """

    def __init__(self, ledger: Ledger, jobs: Sequence[JobView]) -> None:
        self._ledger = ledger
        self._of_kind: dict[str, list[Capacity]] = {}
        for capacity in ledger.capacities:
            self._of_kind.setdefault(capacity.device.kind, []).append(capacity)
        devices = {capacity.device.name: capacity.device for capacity in ledger.capacities}
        self._holds: defaultdict[str, _DeviceHolds] = defaultdict(_DeviceHolds)  # of the devices that matter only
        self._free: dict[tuple[str, Demand], _DeviceQueue[tuple[float, float, int]]] = {}
        self._all: dict[tuple[str, Demand], _DeviceQueue[tuple[float, int]]] = {}
        self._refused: list[Mapping[str, Demand]] = []
        for job in jobs if len(self._of_kind) > 1 else ():
            for name in job.devices:
                if name in devices:
                    self._hold(job, devices[name])

    @property
    def kinds(self) -> Collection[str]:
        """Kinds of the healthy devices."""
        return self._of_kind.keys()

    def first_free(self, job: JobView) -> ExpectedStart | None:
        """Return the device with room now on which a job is expected to end first; None if there is none."""
        return self._first_in(self._free, job.demand, partial(self._rank_free, job))

    def first_faster(self, job: JobView, free: ExpectedStart) -> ExpectedStart | None:
        """Return the device of a faster kind that is worth waiting for, as the job is expected to end sooner there by
        `MIN_WAITING_GAIN`; None if there is none.
        """
        here = job.demand[free.capacity.device.kind].seconds
        faster = {kind: ask for kind, ask in job.demand.items() if 0 < ask.seconds < here}
        if not any(kind in self._of_kind for kind in faster):
            return None
        for demand in self._refused:
            if (start := self._first(demand)) is not None:
                self.reserve(demand, start)
        self._refused.clear()
        found = self._first(faster)
        return found if found is not None and found.end < (1 - MIN_WAITING_GAIN) * free.end else None

    def take(self, job: JobView, capacity: Capacity) -> None:
        """Place a waiting job on a device."""
        self._ledger.take(job, capacity)
        if len(self._of_kind) > 1:
            self._hold(job, capacity.device)

    def reserve(self, demand: Mapping[str, Demand], start: ExpectedStart) -> None:
        """Expect that a job of this demand waits for a device."""
        device = start.capacity.device
        ask = demand[device.kind]
        self._holds[device.name].reserved.append(_Hold(start.end, ask.compute, ask.memory, ask.cores))

    def refuse(self, demand: Mapping[str, Demand]) -> None:
        """Expect that a job of this demand, which fits nowhere now, takes the device on which it would end first."""
        if len(self._of_kind) > 1:
            self._refused.append(demand)

    def _hold(self, job: JobView, device: Device) -> None:
        ask = job.demand[device.kind]
        width: float = max(1, len(job.devices))
        if width == 1 and job.share is not None and device.compute > 0:
            width = min(1.0, job.share / device.compute)
        seconds = ask.seconds * job.scaling.factor(width) or inf
        self._holds[device.name].running.append(_Hold(seconds, job.compute(device), ask.memory, ask.cores))

    def _first(self, demand: Mapping[str, Demand]) -> ExpectedStart | None:
        """Return the device on which a job of this demand is expected to end first, the wait included."""
        return self._first_in(self._all, demand, self._rank_all)

    def _first_in(
        self,
        queues: dict[tuple[str, Demand], _DeviceQueue[Rank]],
        demand: Mapping[str, Demand],
        rank: Callable[[Demand, Capacity], Rank | None],
    ) -> ExpectedStart | None:
        """Return the first device of all kinds of a demand; None if there is none."""
        found: list[tuple[Rank, Capacity]] = []
        for kind, ask in demand.items():
            if kind not in self._of_kind:
                continue
            if (kind, ask) not in queues:
                queues[kind, ask] = _DeviceQueue(partial(rank, ask), self._of_kind[kind])
            if (first := queues[kind, ask].first()) is not None:
                found.append(first)
        if not found:
            return None
        (end, *_), capacity = min(found, key=lambda each: each[0])
        return ExpectedStart(end, capacity)

    def _rank_free(self, job: JobView, ask: Demand, capacity: Capacity) -> tuple[float, float, int] | None:
        if not self._ledger.fits(job, capacity):
            return None
        committed = capacity.device.capacity - capacity.compute + ask.compute
        return ask.seconds * _slowdown(capacity.device, committed), -capacity.compute, capacity.position

    def _rank_all(self, ask: Demand, capacity: Capacity) -> tuple[float, int] | None:
        device, holds = capacity.device, self._holds[capacity.device.name]
        closed, best = capacity.multi_device_jobs > 0, inf
        slowdown = 1.0 if closed else _slowdown(device, device.capacity - capacity.compute)
        ends = [hold._replace(end=hold.end * slowdown) for hold in holds.running]
        compute = capacity.compute - sum(hold.compute for hold in holds.reserved)
        memory = capacity.memory - sum(hold.memory for hold in holds.reserved)
        cores = self._ledger.cores(capacity.node.name) - sum(hold.cores for hold in holds.reserved)
        for hold in (_Hold(0.0, 0.0, 0, 0.0), *sorted([*ends, *holds.reserved])):
            if hold.end >= best:
                break
            compute, memory, cores = compute + hold.compute, memory + hold.memory, cores + hold.cores
            closed = closed and hold.end == 0
            fits = ask.compute <= compute + ROUNDING and ask.memory <= memory and ask.cores <= cores + ROUNDING
            if fits and not closed:
                best = min(best, hold.end + ask.seconds * _slowdown(device, device.capacity - compute + ask.compute))
        return (best, capacity.position) if best < inf else None


def _slowdown(device: Device, committed: float) -> float:
    """Return the slow-down of all jobs on a device with this committed compute."""
    return max(1.0, committed / device.compute) if device.compute > 0 else 1.0
