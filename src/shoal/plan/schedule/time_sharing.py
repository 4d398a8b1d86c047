"""Time-sharing of devices: the base of policies in which jobs take turns."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, isnan, nextafter
from typing import ClassVar, final

from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.core.event import TurnStats
from shoal.core.plain import plain_fields
from shoal.core.resources import ROUNDING, Capacity, Ledger
from shoal.plan.schedule.base import QUANTUM, JobState, JobView, Plan, Policy, Refusal, Suspend
from shoal.plan.schedule.refusals import refusal, start_or_resume

__all__ = ["TimeSharing", "middle_loss"]


@dataclass(frozen=True)
class TimeSharing(Policy):
    """One running job per device; other jobs wait or are suspended (Hermes, section 3.3).

    A started job keeps its device for a quantum. At the end of each quantum it competes with the waiting jobs. The job
    with the highest priority gets the device; the running job wins a tie, then the oldest. Jobs without measured losses
    go before all others, oldest first. A job whose last quantum had no finite loss comes last.

    Only a device with a single job takes turns. Jobs that are not `preemptible`, hold a share or several devices, or
    share their device stay where they are. If no job can be suspended, this is first in, first out.

    A subclass defines the priority.

    Args:
        quantum: Seconds of a turn, without the seconds for resuming the job.

    Raises:
        PolicyError: The quantum is not above 0 and finite.
    """

    quantum: float = QUANTUM

    needs_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        plain_fields(self)
        if not isinstance(self.quantum, int | float) or not (self.quantum > 0 and isfinite(self.quantum)):
            raise PolicyError(f"`quantum` must be above 0 s and finite, got {self.quantum!r}")

    @abstractmethod
    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """Return one number for each of these measured jobs; the highest runs, NaN counts as the lowest.

        A job in its turn is running; the others wait or are suspended.
        """

    def is_measured(self, job: JobView) -> bool:
        """Return whether the job has measurements for a comparison; a running job keeps its device until then."""
        return bool(job.quanta)

    def turn(self, job: JobView) -> float:
        """Return the seconds of a turn of this job."""
        return self.quantum

    def homes(self, jobs: Sequence[JobView], cluster: Cluster) -> Mapping[str, str] | None:
        """Return the device of the queue of each job, or None for one common queue. An absent job is in no queue."""
        return None

    def refusal(self, job: JobView, home: str | None, ledger: Ledger) -> Refusal:
        """Return the refusal of a waiting job.

        Args:
            home: Device of its queue, or None.
        """
        return refusal(job, ledger)

    @final
    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        if all(job.devices for job in jobs):
            return Plan()
        time_shared = _time_shared_jobs(jobs, cluster)
        turn_over = {job.devices[0]: job.id for job in time_shared if self._turn_is_over(job, now)}
        keeping = [job for job in jobs if job.devices and turn_over.get(job.devices[0]) != job.id]
        ledger = Ledger(cluster, keeping, exclusive=True)
        homes = self.homes(jobs, cluster)
        order = self._order(
            [job for job in jobs if not job.devices or turn_over.get(job.devices[0]) == job.id],
            now,
        )
        rank = {job.id: position for position, job in enumerate(order)}
        occupant_rank = {name: rank[occupant] for name, occupant in turn_over.items()}
        placed: list[tuple[JobView, Capacity]] = []
        unplaced: list[JobView] = []
        for job in order:
            if job.devices:
                device_capacity = ledger[job.devices[0]]
                if ledger.fits(job, device_capacity):
                    ledger.take(job, device_capacity)
                else:
                    unplaced.append(job)
                continue
            allowed = ledger.capacities if homes is None else [ledger[homes[job.id]]] if job.id in homes else []
            able = [capacity for capacity in allowed if ledger.fits(job, capacity)]
            if able:
                capacity = min(able, key=lambda capacity: _preference(job, capacity, occupant_rank))
                ledger.take(job, capacity)
                placed.append((job, capacity))
            else:
                unplaced.append(job)
        suspended = [job for job in unplaced if job.devices]
        actions = (
            *(Suspend(job.id) for job in suspended),
            *(start_or_resume(job, capacity) for job, capacity in placed),
        )
        refusals = tuple(self.refusal(job, None if homes is None else homes.get(job.id), ledger) for job in unplaced)
        suspended_ids = {job.id for job in suspended}
        ends = [
            *(self._next_end(job, now) for job in time_shared if job.id not in suspended_ids),
            *(
                now + self.turn(job) + (job.switch_seconds if job.state is JobState.SUSPENDED else 0.0)
                for job, _ in placed
                if job.preemptible
            ),
        ]
        return Plan(actions, refusals, max(min(ends), nextafter(now, inf)) if unplaced and ends else None)

    def _order(self, candidates: Sequence[JobView], now: float) -> list[JobView]:
        measured = [job for job in candidates if self.is_measured(job)]
        priority_of = dict(zip([job.id for job in measured], self.priorities(measured, now), strict=True))

        def key(job: JobView) -> tuple[float, bool]:
            priority = priority_of.get(job.id, inf)
            return (inf if isnan(priority) else -priority, job.id in priority_of and not job.devices)

        return sorted(candidates, key=key)

    def _turn_is_over(self, job: JobView, now: float) -> bool:
        return self.is_measured(job) and self.turn_is_over(job, now)

    def _next_end(self, job: JobView, now: float) -> float:
        """Return the time after `now` at which a running job has completed another turn."""
        turn, began = self.turn(job), job.turn_start(now)
        return began + turn * (max(0, floor((now - began) / turn + ROUNDING)) + 1)


def _time_shared_jobs(jobs: Sequence[JobView], cluster: Cluster) -> list[JobView]:
    """Return the preemptible running jobs that are alone on a single healthy device."""
    healthy = {device.name for _, device in cluster if device.healthy}
    on: dict[str, int] = {}
    for job in jobs:
        for name in job.devices:
            on[name] = on.get(name, 0) + 1
    return [
        job
        for job in jobs
        if job.preemptible
        and job.share is None
        and len(job.devices) == 1
        and job.devices[0] in healthy
        and on[job.devices[0]] == 1
    ]


def _preference(job: JobView, capacity: Capacity, occupant_rank: Mapping[str, int]) -> tuple[float, float, int]:
    """Return the sort key of a device: idle devices by speed, then devices by the priority of their job, the lowest
    first.
    """
    return -occupant_rank.get(capacity.device.name, inf), job.demand[capacity.device.kind].seconds, capacity.position


def middle_loss(quantum: TurnStats) -> float:
    """Return loss_j(i) of Hermes: the middle of the highest and the lowest loss of a quantum."""
    return (quantum.highest + quantum.lowest) / 2
