"""Sharing a device, taking turns on it, or growing over several: whichever is expected to pay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from shoal.core.demand import Demand
from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.schedule.action import JobState, Plan, Resume, Start
from shoal.schedule.base import Changes, JobView, Policy, Session
from shoal.schedule.bin_packing import DeviceOrder, JobOrder
from shoal.schedule.expected_finish import ExpectedFinish
from shoal.schedule.knapsack import WFD, Knapsack
from shoal.schedule.ledger import ROUNDING, Capacity, Ledger, Refusals, begin
from shoal.schedule.plan_estimate import PlanEstimate, plan_estimate
from shoal.schedule.water_filling import WaterFilling

__all__ = ["OBJECTIVES", "Auto", "SpaceSharing", "check_objective"]

OBJECTIVES: Final[Mapping[str, str]] = {
    "makespan": "makespan",
    "mean_completion": "mean completion",
    "time_to_target": "time to target",
}
"""What may count, and its title, the less the better: the end of the last job, of the mean one, or when trials reach
their target."""

_LARGE = 50_000
"""Jobs times devices from which on books are kept instead of looking at everything in each decision; below, one takes
a few milliseconds."""


def check_objective(objective: str) -> None:
    """Refuse what is none.

    Raises:
        PolicyError: there is no such objective.
    """
    if objective not in OBJECTIVES:
        raise PolicyError(f"`objective` must be one of {', '.join(OBJECTIVES)}, got {objective!r}")


@final
@dataclass(frozen=True)
class Auto(Policy):
    """Asks a policy for each way of dividing devices, and takes the plan that is expected to do best by the objective.

    1. Sharing (HyperSack): jobs side by side, see `SpaceSharing`. It moves nobody, and always is a candidate.
    2. Growing (Fluid): if there are jobs of which more is known than what they ask for, the widths of `WaterFilling`.
    3. Taking turns (Hermes): if the objective is the time to a target, jobs wait, and the mean wait is longer than what
       a switch costs, the time-sharing policy. Which trial is worth going on with shows in its losses, of which an
       estimate knows nothing; so turns need only keep the devices as busy as the better of the other two does.

    What a plan is worth is the `PlanEstimate` on it, from measured demands, scalings and costs of moving, time to a
    target being judged by mean completion. A plan that moves jobs has to be better by more than these costs: of equals
    the first is taken.

    Live, a job whose sharing was not seen yet scales as far as its measured demand leaves room for others of its kind
    on a device, and not beyond one. Sharing goes by that as well, and may promise more than a device has. With more
    than 50,000 pairs of a job and a device, jobs are packed by worst fit, the longest or the shortest first, as the
    knapsack policies do, whose sessions keep books.

    One way is taken for all jobs: of jobs that scale among others that do not, either all share or all get devices of
    their own.

    Args:
        objective: what counts, of `OBJECTIVES`.
        turns: the time-sharing policy; None: no turns are taken.

    Raises:
        PolicyError: there is no such objective.
    """

    objective: str = "makespan"
    turns: Policy | None = field(default_factory=ExpectedFinish)

    def __post_init__(self) -> None:
        check_objective(self.objective)

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
        if self.is_large(len(jobs), cluster):
            return self.at_large.plan(jobs, cluster, now)
        best = SpaceSharing(largest_first=self.objective == "makespan").plan(jobs, cluster, now)
        turns = self._turns(jobs)
        grows = any(map(_scales, jobs))
        if not grows and turns is None:
            return best
        expected = plan_estimate(best, jobs, cluster)
        if grows:
            grown = WaterFilling().plan(jobs, cluster, now)
            instead = plan_estimate(grown, jobs, cluster)
            if self._value(instead) < self._value(expected):
                best, expected = grown, instead
        if turns is not None and expected.wait > max(job.switch_seconds for job in jobs):
            turned = turns.plan(jobs, cluster, now)
            if plan_estimate(turned, jobs, cluster).rate >= expected.rate * (1 - ROUNDING):
                best = turned
        return best

    def session(self, cluster: Cluster) -> Session:
        """Begin with a cluster and no jobs."""
        return _AutoSession(self, cluster)

    @property
    def at_large(self) -> Knapsack:
        """What decides when there is too much to look at."""
        return WFD() if self.objective == "makespan" else _ShortestWorstFit()

    def is_large(self, jobs: int, cluster: Cluster) -> bool:
        """Whether there is too much to look at."""
        return jobs * sum(len(node.devices) for node in cluster.nodes) > _LARGE

    def _turns(self, jobs: Sequence[JobView]) -> Policy | None:
        """The time-sharing policy, if there is a choice of who runs."""
        waits = any(job.state is not JobState.RUNNING for job in jobs)
        if self.objective != "time_to_target" or not waits or not any(job.preemptible for job in jobs):
            return None
        return self.turns

    def _value(self, expected: PlanEstimate) -> tuple[float, float]:
        """The less the better; the second decides between equals."""
        if self.objective == "makespan":
            return expected.makespan, expected.mean_completion
        return expected.mean_completion, expected.makespan


@final
class _ShortestWorstFit(Knapsack):
    """The shortest job first, each on the device with the most remaining compute."""

    jobs = JobOrder.SHORTEST
    devices = DeviceOrder.WORST_FIT


def _scales(job: JobView) -> bool:
    """Whether its scaling says more than its demand, by which jobs are side by side at no cost up to a whole device."""
    sharing = job.scaling.sharing
    crowded = sharing * max((ask.compute for ask in job.demand.values()), default=0.0) > 1 + ROUNDING
    return job.scaling.devices > 1 or (sharing > 1 and (job.scaling.alpha > 1 or crowded))


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


class _AutoSession(Session):
    """Hands everything to the policy, or what has changed to a session of the policy at large."""

    def __init__(self, policy: Auto, cluster: Cluster) -> None:
        self._policy = policy
        self._cluster = cluster
        self._jobs: dict[str, JobView] = {}
        self._at_large: Session | None = None

    def plan(self, changes: Changes, now: float) -> Plan:
        self._jobs.update((job.id, job) for job in changes.jobs)
        for name in changes.ended:
            del self._jobs[name]
        self._cluster = changes.cluster or self._cluster
        if not self._policy.is_large(len(self._jobs), self._cluster):
            self._at_large = None
            return self._policy.plan(list(self._jobs.values()), self._cluster, now)
        if self._at_large is None:
            self._at_large = self._policy.at_large.session(self._cluster)
            changes = Changes(tuple(self._jobs.values()))
        return self._at_large.plan(changes, now)
