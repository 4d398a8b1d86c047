"""Trials to arrays to jobs to devices: one turn of planning."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from shoal.cluster.device import Cluster, Device
from shoal.errors import PolicyError
from shoal.planner.grouping import Grouping
from shoal.planner.job import Array, ArrayKey, Job, Member, Purpose
from shoal.planner.joining import hosts, joined
from shoal.planner.partition import Profiles, partition
from shoal.planner.turn import Turn
from shoal.schedule.action import Start
from shoal.schedule.base import JobView, Policy
from shoal.schedule.check import check_plan

__all__ = ["Placement", "Planner"]


@dataclass(frozen=True)
class Placement:
    """What to start now, and why every other waiting trial waits.

    Args:
        starts: jobs with their devices. The members of a job whose purpose is PROFILE go on waiting: they are a sample.
        refusals: number of the trial -> reason; every waiting trial that no training job of `starts` holds, and that
            joins none.
        joins: id of a running job -> who joins it.
    """

    starts: tuple[tuple[Job, Device], ...]
    refusals: Mapping[int, str]
    joins: Mapping[str, tuple[Array, ...]] = field(default_factory=dict)


class Planner:
    """Fuses what waits, packs the arrays, has measured what is unknown, and asks the policy where to run the jobs.

    Who gets no device joins a running array, if that saves time. Arrays that did not start are cut and packed anew at
    the next turn, from all that waits then. Nothing is kept between turns but when each running job started.

    Args:
        policy: decides which job runs where.
        profiles: what is known of a key on a kind of device.
        new_id: gives each job that starts an id that no other job of the study has.
        elastic: whether the members of a running array can change, and stand at different epochs.
        grouping: decides which arrays share a process.
        fuse: whether arrays may have several members.
    """

    def __init__(
        self,
        policy: Policy,
        profiles: Profiles,
        new_id: Callable[[], str],
        elastic: bool = True,
        grouping: Grouping | None = None,
        fuse: bool = True,
    ) -> None:
        self._policy = policy
        self._profiles = profiles
        self._new_id = new_id
        self._elastic = elastic
        self._grouping = grouping or Grouping()
        self._fuse = fuse
        self._started: dict[str, float] = {}

    def plan(
        self,
        waiting: Sequence[tuple[Member, ArrayKey]],
        running: Sequence[tuple[Job, Device]],
        cluster: Cluster,
        now: float,
        *,
        alone: AbstractSet[int] = frozenset(),
        unmeasurable: AbstractSet[tuple[ArrayKey, str]] = frozenset(),
    ) -> Placement:
        """Decide what starts now.

        A key that is known on no kind of device here is measured first, on a device that is otherwise idle. Trials in
        `alone`, and those of a key that cannot be measured, run one to an array; where nothing is known of them, they
        get a whole device.

        Args:
            waiting: oldest first; the number of a trial occurs once.
            running: all jobs that hold devices, oldest first, with the members that they have now.
            cluster: as it is.
            now: seconds, for the policy.
            alone: numbers of trials that failed in company.
            unmeasurable: (key, kind) whose profile job failed; it is not tried again.

        Raises:
            PolicyError: the policy returned an illegal plan.
        """
        turn = Turn(self._profiles, cluster, alone, unmeasurable)
        samples = turn.samples(waiting, running)
        profiling = [(Job(self._new_id(), arrays, Purpose.PROFILE), device) for arrays, device in samples]
        held = [*running, *profiling]
        views = [turn.running_view(job, device, self._started.get(job.id, now), now) for job, device in held]
        ready = [(member, key) for member, key in waiting if turn.ready(member, key)]
        groups: list[tuple[Array, ...]] = []
        if ready:
            busy = _busy(views)
            lone = alone if self._fuse else {member.trial.number for member, _ in ready}
            arrays = partition(ready, self._profiles, turn.devices, busy, lone, self._elastic)
            groups = self._grouping.groups(arrays, self._profiles, turn.devices, busy, alone)
        placed, refused = self._ask(views, groups, turn, now)
        joins: Mapping[str, tuple[Array, ...]] = {}
        if self._elastic:
            joins = self._joins([array for array, _ in refused], held, placed, turn, alone)
        joining = {member.trial.number for arrays in joins.values() for array in arrays for member in array.members}
        refusals = {
            member.trial.number: reason
            for array, reason in refused
            for member in array.members
            if member.trial.number not in joining
        }
        ready_numbers = {member.trial.number for member, _ in ready}
        for member, key in waiting:
            if member.trial.number not in ready_numbers:
                refusals[member.trial.number] = turn.reason(key, held)
        self._started = {job.id: self._started.get(job.id, now) for job, _ in (*held, *placed)}
        return Placement((*profiling, *placed), refusals, joins)

    def _joins(
        self,
        arrays: Sequence[Array],
        held: Sequence[tuple[Job, Device]],
        placed: Sequence[tuple[Job, Device]],
        turn: Turn,
        alone: AbstractSet[int],
    ) -> dict[str, tuple[Array, ...]]:
        """Who of the arrays that found no device joins which job."""
        free = {device.name: device.memory for device in turn.devices}
        for job, device in (*held, *placed):
            free[device.name] -= turn.memory(job, device)
        sociable = [array for array in arrays if not any(member.trial.number in alone for member in array.members)]
        joins = joined(sociable, hosts(held, free, self._profiles, alone)) if self._fuse else {}
        joining = {member.trial.number for some in joins.values() for array in some for member in array.members}
        left = [array for array in sociable if not any(member.trial.number in joining for member in array.members)]
        for name, come in self._grouping.taken_in(left, held, self._profiles, free, alone).items():
            joins[name] = (*joins.get(name, ()), *come)
        return joins

    def _ask(
        self, running: Sequence[JobView], groups: Sequence[tuple[Array, ...]], turn: Turn, now: float
    ) -> tuple[list[tuple[Job, Device]], list[tuple[Array, str]]]:
        """Let the policy place the groups; only those that start become jobs, so that only they use up an id.

        Returns:
            The jobs that start, and the arrays that do not, each with the reason.
        """
        candidates = {f"waiting-{index}": group for index, group in enumerate(groups)}
        views = [*running, *(JobView(name, turn.demands(group), since=now) for name, group in candidates.items())]
        plan = self._policy.plan(views, turn.cluster, now)
        check_plan(plan, views, turn.cluster, now)
        placed: list[tuple[Job, Device]] = []
        for action in plan.actions:
            if not isinstance(action, Start):
                raise PolicyError(f"{action}: there is no job yet that could be continued")
            device = turn.cluster.device(action.devices[0])
            known = [replace(x, profile=self._profiles(x.key, device.kind)) for x in candidates[action.job]]
            placed.append((Job(self._new_id(), tuple(known)), device))
        return placed, [(array, refusal.reason) for refusal in plan.refusals for array in candidates[refusal.job]]


def _busy(running: Sequence[JobView]) -> dict[str, float]:
    """Expected seconds until each device that holds jobs is free; 0 for one that is overdue."""
    busy: dict[str, float] = {}
    for job in running:
        left = max(demand.seconds for demand in job.demand.values())
        for name in job.devices:
            busy[name] = max(busy.get(name, 0.0), left)
    return busy
