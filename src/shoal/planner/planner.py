"""Trials to arrays to jobs to devices: one turn of planning."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from shoal.cluster.device import Cluster, Device
from shoal.errors import PolicyError
from shoal.planner.job import Array, ArrayKey, Job, Member, Purpose
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
        refusals: number of the trial -> reason; every waiting trial that no training job of `starts` holds.
    """

    starts: tuple[tuple[Job, Device], ...]
    refusals: Mapping[int, str]


class Planner:
    """Fuses what waits, has measured what is unknown, and asks the policy where to run it.

    Arrays that did not start are cut anew at the next turn, from all that waits then. Nothing is kept between turns but
    when each running job started.

    Args:
        policy: decides which job runs where.
        profiles: what is known of a key on a kind of device.
        new_id: gives each job that starts an id that no other job of the study has.
    """

    def __init__(self, policy: Policy, profiles: Profiles, new_id: Callable[[], str]) -> None:
        self._policy = policy
        self._profiles = profiles
        self._new_id = new_id
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
            running: all jobs that hold devices, oldest first.
            cluster: as it is.
            now: seconds, for the policy.
            alone: numbers of trials that failed in company.
            unmeasurable: (key, kind) whose profile job failed; it is not tried again.

        Raises:
            PolicyError: the policy returned an illegal plan.
        """
        turn = Turn(self._profiles, cluster, alone, unmeasurable)
        samples = turn.samples(waiting, running)
        profiling = [(Job(self._new_id(), (sample,), Purpose.PROFILE), device) for sample, device in samples]
        held = [*running, *profiling]
        views = [turn.running_view(job, device, self._started.get(job.id, now), now) for job, device in held]
        ready = [(member, key) for member, key in waiting if turn.ready(member, key)]
        arrays = partition(ready, self._profiles, turn.devices, _busy(views), alone) if ready else []
        placed, refusals = self._ask(views, arrays, turn, now)
        ready_numbers = {member.trial.number for member, _ in ready}
        for member, key in waiting:
            if member.trial.number not in ready_numbers:
                refusals[member.trial.number] = turn.reason(key, held)
        self._started = {job.id: self._started.get(job.id, now) for job, _ in (*held, *placed)}
        return Placement((*profiling, *placed), refusals)

    def _ask(
        self, running: Sequence[JobView], arrays: Sequence[Array], turn: Turn, now: float
    ) -> tuple[list[tuple[Job, Device]], dict[int, str]]:
        """Let the policy place the arrays; only those that start become jobs, so that only they use up an id."""
        candidates = {f"waiting-{index}": array for index, array in enumerate(arrays)}
        views = [*running, *(JobView(name, turn.demands(array), since=now) for name, array in candidates.items())]
        plan = self._policy.plan(views, turn.cluster, now)
        check_plan(plan, views, turn.cluster, now)
        placed: list[tuple[Job, Device]] = []
        for action in plan.actions:
            if not isinstance(action, Start):
                raise PolicyError(f"{action}: there is no job yet that could be continued")
            array, device = candidates[action.job], turn.cluster.device(action.devices[0])
            known = replace(array, profile=self._profiles(array.key, device.kind))
            placed.append((Job(self._new_id(), (known,)), device))
        refusals = {
            member.trial.number: refusal.reason
            for refusal in plan.refusals
            for member in candidates[refusal.job].members
        }
        return placed, refusals


def _busy(running: Sequence[JobView]) -> dict[str, float]:
    """Expected seconds until each device that holds jobs is free; 0 for one that is overdue."""
    busy: dict[str, float] = {}
    for job in running:
        left = max(demand.seconds for demand in job.demand.values())
        for name in job.devices:
            busy[name] = max(busy.get(name, 0.0), left)
    return busy
