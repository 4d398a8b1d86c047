"""Jobs on devices they share, as a multiple knapsack (HyperSack, section 3): the greedy heuristics."""

from bisect import insort
from collections.abc import Sequence
from typing import ClassVar, final

from shoal.cluster.device import Cluster
from shoal.schedule.action import Action, JobState, Plan
from shoal.schedule.base import JobView, Policy
from shoal.schedule.ledger import ROUNDING, Ledger, Room, begin

__all__ = ["WFD", "Knapsack"]


class Knapsack(Policy):
    """Puts one job after the other on a device that has room for it; a subclass says in which order.

    Compute may be promised up to a device's capacity; its memory and the cores of its node are hard. What remains is
    reduced by every assignment, and a job that fits nowhere waits without holding up the jobs behind it.
    """

    longest_first: ClassVar[bool]
    """Jobs by expected seconds on their fastest device, longest first; otherwise oldest first."""
    emptiest_first: ClassVar[bool]
    """Devices by remaining compute, most first; otherwise in the cluster's order."""

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        ledger = Ledger(cluster, jobs)
        rooms = sorted(ledger.rooms, key=self._rank)
        kinds = {room.device.kind for room in rooms}
        waiting = [job for job in jobs if job.state is not JobState.RUNNING]
        queue = sorted(waiting, key=lambda job: -_seconds(job, kinds)) if self.longest_first else waiting
        actions: list[Action] = []
        for job in queue:
            place = self._first_fit(job, rooms, ledger)
            if place is not None:
                room = rooms.pop(place)
                ledger.take(job, room)
                insort(rooms, room, key=self._rank)
                actions.append(begin(job, room))
        placed = {action.job for action in actions}
        return Plan(tuple(actions), tuple(ledger.refusal(job) for job in waiting if job.id not in placed))

    def _rank(self, room: Room) -> tuple[float, int]:
        return (-room.compute if self.emptiest_first else 0.0, room.position)

    def _first_fit(self, job: JobView, rooms: Sequence[Room], ledger: Ledger) -> int | None:
        """Index of the first room that the job fits in; emptiest first, no room behind a too full one is looked at."""
        least = min((demand.compute for demand in job.demand.values()), default=0.0)
        for index, room in enumerate(rooms):
            if self.emptiest_first and room.compute + ROUNDING < least:
                return None
            if ledger.fits(job, room):
                return index
        return None


def _seconds(job: JobView, kinds: set[str]) -> float:
    """Expected run time on the fastest kind of device that is here."""
    return min((demand.seconds for kind, demand in job.demand.items() if kind in kinds), default=0.0)


@final
class WFD(Knapsack):
    """Worst fit decreasing: the longest job first, each on the device with the most remaining compute."""

    longest_first = True
    emptiest_first = True
