"""First in, first out: one job a device."""

from collections.abc import Sequence
from typing import final

from shoal.cluster.device import Cluster
from shoal.schedule.action import Action, JobState, Plan
from shoal.schedule.base import JobView, Policy
from shoal.schedule.ledger import Ledger, begin

__all__ = ["Fifo"]


@final
class Fifo(Policy):
    """Each job that waits or is suspended, oldest first, gets the first idle device that it fits on.

    This is the baseline of HyperSack: devices are not shared. A job that fits no idle device does not hold up those
    behind it: trials do not depend on each other, and an idle device helps none of them.
    """

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        ledger = Ledger(cluster, jobs, exclusive=True)
        actions: list[Action] = []
        waiting: list[JobView] = []
        for job in (job for job in jobs if job.state is not JobState.RUNNING):
            room = next((room for room in ledger.rooms if ledger.fits(job, room)), None)
            if room is None:
                waiting.append(job)
                continue
            ledger.take(job, room)
            actions.append(begin(job, room))
        return Plan(tuple(actions), tuple(ledger.refusal(job) for job in waiting))
