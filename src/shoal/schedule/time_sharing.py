"""Time-sharing of devices: the base of policies in which jobs take turns, and the policies round robin and SLAQ."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, isnan, nextafter
from typing import final

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import PolicyError
from shoal.core.event import TurnStats
from shoal.schedule.action import JobState, Plan, Refusal, Suspend
from shoal.schedule.base import JobView, Policy
from shoal.schedule.ledger import ROUNDING, Capacity, Ledger, begin

__all__ = ["QUANTUM", "RoundRobin", "Slaq", "TimeSharing", "holds", "middle_loss"]

QUANTUM = 10.0
"""Default seconds of a turn."""


@dataclass(frozen=True)
class TimeSharing(Policy):
    """One running job per device; other jobs wait or are suspended (Hermes, section 3.3).

    A started job keeps its device for a quantum. Then it competes with the waiting jobs at every plan, at least at the
    end of each quantum. The job with the highest priority gets the device; the running job wins a tie, then the oldest.
    Jobs without measured losses go before all others, oldest first.

    Only a device with a single job takes turns. Jobs that are not `preemptible`, hold a share or several devices, or
    share their device stay where they are. If no job can be suspended, this is first in, first out.

    A subclass defines the priority.

    Args:
        quantum: Seconds of a turn, without the seconds for resuming the job.

    Raises:
        PolicyError: The quantum is not above 0 and finite.
    """

    quantum: float = QUANTUM

    def __post_init__(self) -> None:
        if not isinstance(self.quantum, int | float) or not (self.quantum > 0 and isfinite(self.quantum)):
            raise PolicyError(f"`quantum` must be above 0 s and finite, got {self.quantum!r}")

    @abstractmethod
    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """One number for each of these measured jobs; the highest runs, NaN counts as the lowest.

        A job in its turn is running; the others wait or are suspended.
        """

    def is_measured(self, job: JobView) -> bool:
        """Whether the job has measurements for a comparison; a running job keeps its device until then."""
        return bool(job.quanta)

    def turn(self, job: JobView) -> float:
        """Seconds of a turn of this job."""
        return self.quantum

    def homes(self, jobs: Sequence[JobView], cluster: Cluster) -> Mapping[str, str] | None:
        """Job -> device of its queue, or None for one common queue. An absent job is in no queue."""
        return None

    def refusal(self, job: JobView, home: str | None, ledger: Ledger) -> Refusal:
        """Refusal of a waiting job.

        Args:
            job: The waiting job.
            home: Device of its queue, or None.
            ledger: Remaining resources of the cluster.
        """
        return ledger.refusal(job)

    @final
    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        if all(job.devices for job in jobs):
            return Plan()
        sharing = _taking_turns(jobs, cluster)
        yielding = {job.devices[0]: job.id for job in sharing if self._is_over(job, now)}
        staying = [job for job in jobs if job.devices and yielding.get(job.devices[0]) != job.id]
        ledger = Ledger(cluster, staying, exclusive=True)
        homes = self.homes(jobs, cluster)
        order = self._order(
            [job for job in jobs if not job.devices or yielding.get(job.devices[0]) == job.id],
            now,
        )
        rank = {job.id: position for position, job in enumerate(order)}
        occupied = {name: rank[occupant] for name, occupant in yielding.items()}
        rooms = {room.device.name: room for room in ledger.rooms}
        begun: list[tuple[JobView, Capacity]] = []
        off: list[JobView] = []
        for job in order:
            if job.devices:
                own = rooms[job.devices[0]]
                if ledger.fits(job, own):
                    ledger.charge(job, own)
                else:
                    off.append(job)
                continue
            allowed = ledger.rooms if homes is None else [rooms[homes[job.id]]] if job.id in homes else []
            able = [room for room in allowed if ledger.fits(job, room)]
            if able:
                room = min(able, key=lambda room: _preference(job, room, occupied))
                ledger.take(job, room)
                begun.append((job, room))
            else:
                off.append(job)
        suspended = [job for job in off if job.devices]
        actions = (*(Suspend(job.id) for job in suspended), *(begin(job, room) for job, room in begun))
        refusals = tuple(self.refusal(job, None if homes is None else homes.get(job.id), ledger) for job in off)
        gone = {job.id for job in suspended}
        ends = [
            *(self._next_end(job, now) for job in sharing if job.id not in gone),
            *(
                now + self.turn(job) + (job.switch_seconds if job.state is JobState.SUSPENDED else 0.0)
                for job, _ in begun
                if job.preemptible
            ),
        ]
        return Plan(actions, refusals, max(min(ends), nextafter(now, inf)) if off and ends else None)

    def _order(self, candidates: Sequence[JobView], now: float) -> list[JobView]:
        """The competing jobs, the first to get a device first."""
        measured = [job for job in candidates if self.is_measured(job)]
        value = dict(zip([job.id for job in measured], self.priorities(measured, now), strict=True))

        def key(job: JobView) -> tuple[float, bool]:
            priority = value.get(job.id, inf)
            return (inf if isnan(priority) else -priority, job.id in value and not job.devices)

        return sorted(candidates, key=key)

    def _is_over(self, job: JobView, now: float) -> bool:
        """Whether the turn of a job is over."""
        return self.is_measured(job) and now - _began(job, now) >= self.turn(job) * (1 - ROUNDING)

    def _next_end(self, job: JobView, now: float) -> float:
        """Time after `now` at which a running job has completed another turn."""
        turn, began = self.turn(job), _began(job, now)
        return began + turn * (max(0, floor((now - began) / turn + ROUNDING)) + 1)


@final
@dataclass(frozen=True)
class RoundRobin(TimeSharing):
    """The job with the longest wait, since its arrival or its last turn, has the next turn.

    This is the time-sharing of Gandiva (Xiao et al., OSDI 2018) as Hermes compares with it, whose quantum is the
    default. It ignores losses.

    Args:
        quantum: Seconds of a turn.
    """

    quantum: float = 30.0

    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """Seconds of waiting; a running job comes last."""
        return [-inf if job.devices else now - job.since for job in jobs]

    def is_measured(self, job: JobView) -> bool:
        """Always true, since only time counts."""
        return True


@final
@dataclass(frozen=True)
class Slaq(TimeSharing):
    """The job with the highest newest loss runs.

    This is SLAQ (Zhang et al., SoCC 2017) as Hermes compares with it (section 4.2), whose quantum is the default: the
    quality still to be gained on one device counts, not the gain in the next quantum that SLAQ itself predicts.

    Args:
        quantum: Seconds of a turn.
    """

    quantum: float = 30.0

    def priorities(self, jobs: Sequence[JobView], now: float) -> Sequence[float]:
        """The newest loss."""
        return [job.quanta[-1].last for job in jobs]


def _began(job: JobView, now: float) -> float:
    """Start of the turns of a running job: after the switch, if it has run before."""
    resumed = job.ran > (now - job.since) * (1 + ROUNDING)
    return job.since + (job.switch_seconds if resumed else 0.0)


def _taking_turns(jobs: Sequence[JobView], cluster: Cluster) -> list[JobView]:
    """Preemptible running jobs that are alone on a single healthy device."""
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


def _preference(job: JobView, room: Capacity, occupied: Mapping[str, int]) -> tuple[float, float, int]:
    """Sort key of a device: idle devices by speed, then devices by the priority of their job, the lowest first."""
    return -occupied.get(room.device.name, inf), job.demand[room.device.kind].seconds, room.position


def holds(node: Node, device: Device, job: JobView) -> bool:
    """Whether the job fits on the empty device."""
    demand = job.demand.get(device.kind)
    return (
        demand is not None
        and demand.compute <= device.capacity + ROUNDING
        and demand.memory <= device.memory
        and demand.cores <= node.cores + ROUNDING
    )


def middle_loss(quantum: TurnStats) -> float:
    """loss_j(i) of Hermes: the middle of the highest and the lowest loss of a quantum."""
    return (quantum.highest + quantum.lowest) / 2
