"""Jobs side by side, each on the device where it is expected to end first: how `auto` shares devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.schedule.action import JobState, Plan, Resume, Start
from shoal.schedule.base import JobView, Policy
from shoal.schedule.ledger import Capacity, Ledger, begin
from shoal.schedule.refusals import Refusals

__all__ = ["SpaceSharing"]

_Need = tuple[tuple[str, float, int, float], ...]
"""Kind of device, compute, memory and cores, for every kind that a job runs on."""


@final
@dataclass(frozen=True)
class SpaceSharing(Policy):
    """In the order of their work, each job on the device where it is expected to end first.

    - A job's work is compute times seconds, on its fastest kind of device here: what it takes of a full device, in
      whatever shares its jobs divide it. For the makespan the largest work goes first, so that the smallest is left to
      even out the end (LPT; R. L. Graham, 1969), where the critical path from a job on counts in place of its work if
      it is longer (T. C. Hu, 1961); for the mean completion the smallest (W. E. Smith, 1956).
    - On a device it is expected to take seconds · max(1, promised / compute), where what is promised there includes its
      own demand. Of equals, the device with the most compute left is taken. So on devices of one kind this is worst
      fit, and of several kinds the fastest is shared until that costs as much as a slower one.

    Capacity, memory, cores and jobs that run or are suspended are treated as by the knapsack policies.

    Args:
        largest_first: whether the largest work goes first, or the smallest.
    """

    largest_first: bool = True

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        ledger = Ledger(cluster, jobs)
        kinds = {room.device.kind for room in ledger.rooms}
        waiting = [job for job in jobs if job.state is not JobState.RUNNING]
        demands = {id(job.demand): job.demand for job in waiting}
        fastest = {key: _fastest(demand, kinds) for key, demand in demands.items()}
        needs = {key: _need(demand) for key, demand in demands.items()}
        fits_nowhere: set[_Need] = set()
        actions: list[Start | Resume] = []
        for job in sorted(waiting, key=lambda job: self._rank(job, *fastest[id(job.demand)])):
            need = needs[id(job.demand)]
            if need in fits_nowhere:
                continue
            rooms = [room for room in ledger.rooms if ledger.fits(job, room)]
            if not rooms:
                fits_nowhere.add(need)
                continue
            room = min(rooms, key=lambda room: _expected(job.demand, room))
            ledger.take(job, room)
            actions.append(begin(job, room))
        return Plan(tuple(actions), Refusals(len(waiting) - len(actions), lambda: jobs, actions, cluster))

    def _rank(self, job: JobView, seconds: float, compute: float) -> float:
        """The less, the earlier."""
        work = seconds * compute
        return -max(work, job.critical_path) if self.largest_first else work


def _fastest(demand: Mapping[str, Demand], kinds: set[str]) -> tuple[float, float]:
    """Seconds and compute on the fastest kind of device."""
    return min(((ask.seconds, ask.compute) for kind, ask in demand.items() if kind in kinds), default=(0.0, 0.0))


def _need(demand: Mapping[str, Demand]) -> _Need:
    return tuple((kind, ask.compute, ask.memory, ask.cores) for kind, ask in demand.items())


def _expected(demand: Mapping[str, Demand], room: Capacity) -> tuple[float, float, int]:
    """Seconds that a job of this demand would take there, and what decides between equals."""
    device, ask = room.device, demand[room.device.kind]
    promised = device.capacity - room.compute + ask.compute
    crowding = max(1.0, promised / device.compute) if device.compute > 0 else 1.0
    return ask.seconds * crowding, -room.compute, room.position
