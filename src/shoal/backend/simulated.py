"""A cluster that exists only in a virtual clock: the same policies as live, asked the same questions, at no cost.

A simulation is a heap of events in time: arrivals, ends of jobs, changes of the cluster, and the times at which the
policy wanted to be asked again. Between two events every job makes progress at a constant speed.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf, isfinite

from shoal.backend.simulated_job import ClusterEvent, SimulatedJob, SlowDown, Source, Tenant, after, never_fits, sizes
from shoal.backend.simulated_life import Life
from shoal.backend.simulated_outcome import Interval, Outcome, Usage
from shoal.backend.simulated_watch import Stay, Watch
from shoal.core.device import Cluster, Device
from shoal.core.errors import PolicyError, ScenarioError
from shoal.schedule.action import Action, JobState, Plan, Resize, Resume, Stop, Suspend
from shoal.schedule.base import Changes, JobView, Policy
from shoal.schedule.check import check_plan
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.schedule.turns import QUANTUM

__all__ = ["ClusterEvent", "Interval", "Outcome", "SimulatedJob", "Simulation", "SlowDown", "Source", "Tenant"]

_ROUNDS = 1000
"""Decisions at one instant, beside one for each job, after which time is taken to stand still."""

_Event = tuple[float, int, SimulatedJob | ClusterEvent | Life | Stay | None, int]
"""When, in which order among equals, what (None: the policy asked for it), and of a job the version of its end."""


class Simulation:
    """One policy at work on jobs and a cluster; serves one run.

    Args:
        jobs: in any order; they wait from their `arrival` on.
        cluster: as it is at the start.
        policy: decides which job runs where.
        slowdown: who slows down whom on a shared device; None: nobody does.
        sources: make more jobs as time goes on.
        events: changes of the cluster, in any order.
        quantum: seconds for which a job runs at least before its losses are written down; that is done when the policy
            is woken at a time that it named, and at once when the job is suspended, is stopped or ends.
        lean: for thousands of devices: of a job, the policy is told only when it arrives, begins, leaves its devices or
            ends, not how far it has come meanwhile, and plans are not checked.
        tuner: finds the oversubscription of the devices while the simulation runs, from what a `Watch` observes; the
            cluster's own counts for the kinds that it leaves alone. Where a ratio falls, jobs that run stay.
        timer: real seconds, to measure what decisions take.

    Raises:
        ScenarioError: two jobs have one id, a cluster event has no time, or `quantum` is none.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        cluster: Cluster,
        policy: Policy,
        slowdown: SlowDown | None = None,
        *,
        sources: Sequence[Source] = (),
        events: Sequence[ClusterEvent] = (),
        quantum: float = QUANTUM,
        lean: bool = False,
        tuner: OversubscriptionTuner | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 <= quantum < inf:
            raise ScenarioError(f"`quantum` must be finite and not negative, got {quantum!r}")
        self._policy = policy
        self._slowdown = slowdown
        self._sources = sources
        self._quantum = quantum
        self._lean = lean
        self._tuner = tuner
        self._watch = None if tuner is None else Watch(tuner)
        self._timer = timer
        self._heap: list[_Event] = []
        self._order = count()
        self._numbers = count()
        self._owner: dict[str, Source] = {}
        self._lives: dict[str, Life] = {}
        self._arrivals: dict[str, float] = {}
        self._completion: dict[str, float] = {}
        self._reached: dict[str, float] = {}
        self._best: dict[str | None, float] = {}  # study -> the lowest loss measured
        self._refused: dict[str, str] = {}
        self._intervals: list[Interval] = []
        self._usage = Usage()
        self._changed: dict[str, Life] = {}
        self._ended: list[str] = []
        self._running: dict[str, Life] = {}
        self._views: dict[str, JobView] = {}
        self._on: dict[str, dict[str, Life]] = {}
        self._decisions = self._switches = 0
        self._decision_seconds = self._longest = 0.0
        self._set_cluster(self._tuned(cluster))
        self._sizes = sizes(self._tuned(Cluster((*cluster.nodes, *(node for event in events for node in event.added)))))
        self._cluster_changed = False
        self._wake: float | None = None  # when the policy's last plan asked to be woken
        self._coming = 0  # arrivals and changes of the cluster in the heap
        for event in events:
            self._push(event.at, event)
        self._enlist(jobs, None)
        for source in sources:
            self._enlist(source.begin(), source)

    def run(self) -> Outcome:
        """Go on until all jobs have ended, or nothing more can happen.

        Raises:
            PolicyError: the policy made an illegal plan, or stops what it starts for ever.
        """
        session = self._policy.session(self._cluster)
        was_stuck = False
        plan = Plan()
        then, rounds = -inf, 0
        while self._heap:
            now = self._heap[0][0]
            if not self._take(now):
                continue
            then, rounds = now, rounds + 1 if now == then else 1
            if rounds > _ROUNDS + len(self._arrivals):
                raise PolicyError(
                    f"{self._policy!r} was asked {rounds - 1} times at {now:g} s, and time does not go on: "
                    "it starts what it stops"
                )
            views, changes = self._tell(now)
            began = self._timer()
            plan = session.plan(changes, now)
            self._count(self._timer() - began)
            if not self._lean:
                check_plan(plan, views, self._cluster, now)
            self._carry_out(plan, now)
            self._usage.note(now)
            stuck = self._stuck(plan)
            self._wake = None if stuck and was_stuck else plan.wake
            if self._retune(now) or any(isinstance(action, Stop) for action in plan.actions):
                self._wake = now  # there is more room or less, or what was stopped is there anew
            if self._wake is not None:
                heapq.heappush(self._heap, (self._wake, next(self._order), None, 0))
            was_stuck = stuck
        return self._outcome(plan)

    def _enlist(self, jobs: Iterable[SimulatedJob], source: Source | None) -> None:
        for job in jobs:
            if job.id in self._arrivals:
                raise ScenarioError(f"two jobs are called {job.id!r}; give each an id of its own")
            self._arrivals[job.id] = job.arrival
            if source is not None:
                self._owner[job.id] = source
            self._push(job.arrival, job)

    def _push(self, at: float, what: SimulatedJob | ClusterEvent) -> None:
        if not isfinite(at):
            raise ScenarioError(f"{what} has no time: {at!r}; say after how many seconds it comes")
        heapq.heappush(self._heap, (at, next(self._order), what, 0))
        self._coming += 1

    def _set_cluster(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._cluster_changed = True
        self._devices = {device.name: device for _, device in cluster}
        self._usage.set_total(sum(device.compute for device in self._devices.values() if device.healthy))

    def _tuned(self, cluster: Cluster) -> Cluster:
        return cluster if self._tuner is None else self._tuner.apply(cluster)

    def _retune(self, now: float) -> bool:
        """Let the cluster have the ratios that the tuner wants now; whether they are others than before."""
        tuned = None if self._watch is None else self._watch.retuned(self._cluster, now)
        if tuned is not None:
            self._set_cluster(tuned)
        return tuned is not None

    def _take(self, now: float) -> bool:
        """Let everything happen that happens now; whether the policy has to be asked."""
        self._usage.advance(now)
        asked = False
        touched: set[str] = set()
        while self._heap and self._heap[0][0] <= now:
            at, _, what, version = heapq.heappop(self._heap)
            if isinstance(what, SimulatedJob):
                self._coming -= 1
                asked |= self._arrive(what, now)
            elif isinstance(what, ClusterEvent):
                self._coming -= 1
                touched |= self._change_cluster(what, now)
                asked = True
            elif isinstance(what, Life):
                if what.version == version:
                    touched |= self._finish(what, now)
                    asked = True
            elif isinstance(what, Stay):
                if self._watch is not None and self._watch.look(what, now, waiting=self._has_waiting()):
                    self._look_later(what, now)
            elif at == self._wake:
                self._end_turns(now)
                asked = True
        self._settle(touched, now)
        return self._retune(now) or asked

    def _look_later(self, stay: Stay | None, now: float) -> None:
        if stay is not None and now < stay.due < inf:
            heapq.heappush(self._heap, (stay.due, next(self._order), stay, 0))

    def _has_waiting(self) -> bool:
        return len(self._lives) > len(self._running)

    def _end_turns(self, now: float) -> None:
        for life in self._running.values():
            life.advance(now)
            life.measure(self._quantum)
            self._compare(life)

    def _compare(self, life: Life) -> None:
        """Let the jobs of its study know, if it has measured the lowest loss so far."""
        study = life.job.study
        if life.quanta and life.quanta[-1].lowest < self._best.get(study, inf):
            self._best[study] = life.quanta[-1].lowest
            if not self._lean:
                self._changed.update((name, each) for name, each in self._lives.items() if each.job.study == study)

    def _arrive(self, job: SimulatedJob, now: float) -> bool:
        """Whether the job is let in."""
        fault = never_fits(job, self._sizes)
        if fault is not None:
            self._refused[job.id] = f"can never run here: {fault}"
            return False
        life = Life(job, next(self._numbers), since=now, updated=now)
        self._lives[job.id] = self._changed[job.id] = life
        return True

    def _finish(self, life: Life, now: float) -> set[str]:
        name = life.job.id
        life.advance(now)
        life.measure(0.0)
        self._compare(life)
        if life.reached is not None:
            self._reached[name] = life.reached
        touched = self._release(life, now)
        life.version += 1
        del self._lives[name]
        self._changed.pop(name, None)
        self._ended.append(name)
        self._completion[name] = now
        if (source := self._owner.pop(name, None)) is not None:
            self._enlist(source.ended(name, now), source)
        return touched

    def _change_cluster(self, event: ClusterEvent, now: float) -> set[str]:
        """Devices whose jobs are others now."""
        self._set_cluster(self._tuned(after(self._cluster, event)))
        touched: set[str] = set()
        for life in list(self._running.values()):
            if all((device := self._devices.get(name)) is not None and device.healthy for name in life.devices):
                continue
            life.advance(now)
            touched |= self._release(life, now)
            life.lose(now)
            self._switches += 1
            self._changed[life.job.id] = life
        return touched

    def _tell(self, now: float) -> tuple[Sequence[JobView], Changes]:
        """All jobs, for the check, and those that are new to the policy, both in order of arrival."""
        if not self._lean:
            for life in self._running.values():
                life.advance(now)
            self._changed.update(self._running)
        told = [
            life.view(self._best.get(life.job.study))
            for life in sorted(self._changed.values(), key=lambda life: life.number)
        ]
        changes = Changes(tuple(told), tuple(self._ended), self._cluster if self._cluster_changed else None)
        self._changed, self._ended, self._cluster_changed = {}, [], False
        if not self._lean:
            for name in changes.ended:
                del self._views[name]
            self._views.update((view.id, view) for view in told)
        return list(self._views.values()), changes

    def _count(self, seconds: float) -> None:
        self._decisions += 1
        self._decision_seconds += seconds
        self._longest = max(self._longest, seconds)

    def _carry_out(self, plan: Plan, now: float) -> None:
        touched: set[str] = set()
        for action in plan.actions:
            touched |= self._act(action, self._lives[action.job], now)
        self._settle(touched, now)

    def _act(self, action: Action, life: Life, now: float) -> set[str]:
        """Do one action; the devices whose jobs are others now."""
        self._changed[life.job.id] = life
        touched: set[str] = set()
        if life.devices:
            life.advance(now)
            touched = self._release(life, now)
            self._switches += 1
        if isinstance(action, Suspend):
            life.leave(JobState.SUSPENDED, now)
            self._compare(life)
        elif isinstance(action, Stop):
            life.leave(JobState.WAITING, now)
            self._compare(life)
        else:
            job = life.job
            costs = {Resume: job.switch_seconds, Resize: job.scaling.resize_seconds}
            devices = [self._devices[name] for name in action.devices]
            life.begin(devices, action.share, costs.get(type(action), job.start_seconds), now)
            self._running[job.id] = life
            for name in action.devices:
                self._on.setdefault(name, {})[job.id] = life
            touched.update(action.devices)
        return touched

    def _release(self, life: Life, now: float) -> set[str]:
        """Take a job off its devices, and write down that it was there."""
        del self._running[life.job.id]
        for name in life.devices:
            here = self._on[name]
            del here[life.job.id]
            self._intervals.append(Interval(life.job.id, name, life.began, now, life.compute[name]))
        return set(life.devices)

    def _settle(self, touched: Iterable[str], now: float) -> None:
        """Give every job on these devices the speed that it has from now on."""
        for name in sorted(touched):
            if self._watch is not None:
                self._watch.end(name, now, waiting=self._has_waiting())
            here = list(self._on.get(name, {}).values())
            device = self._devices.get(name)
            if device is None or not here:
                self._usage.set_device(name, None)
                continue
            if len(here) == 1 and len(here[0].devices) > 1:
                speeds: Sequence[float] = (1.0,)
            else:
                speeds = self._speeds(device, here)
            for life, speed in zip(here, speeds, strict=True):
                pace = self._pace(life, speed)
                if pace == life.pace:
                    continue
                life.advance(now)
                life.pace = pace
                life.version += 1
                if isfinite(end := life.end()):
                    heapq.heappush(self._heap, (end, next(self._order), life, life.version))
            if self._watch is not None:
                self._look_later(self._watch.begin(device, here, speeds, now), now)
            self._usage.set_device(name, min(device.compute, sum(life.compute[name] for life in here)))

    def _speeds(self, device: Device, here: Sequence[Life]) -> Sequence[float]:
        if self._slowdown is None:
            return [1.0] * len(here)
        return self._slowdown.speeds(device, [Tenant(life.job, life.share) for life in here])

    def _pace(self, life: Life, speed: float) -> float:
        """Seconds for the whole job: of several kinds of devices, the slowest counts."""
        job = life.job
        alone = max(job.demand[self._devices[name].kind].seconds for name in life.devices)
        if not speed > 0:
            return inf
        return alone * job.dilation * job.scaling.factor(len(life.devices)) / speed

    def _stuck(self, plan: Plan) -> bool:
        """Nothing was done, nothing moves, nothing is to come."""
        moving = any(isfinite(life.end()) for life in self._running.values())
        return not (plan.actions or self._coming or moving)

    def _outcome(self, plan: Plan) -> Outcome:
        now = self._usage.now
        reasons = {refusal.job: refusal.reason for refusal in plan.refusals} if self._lives else {}
        for life in list(self._running.values()):
            reasons[life.job.id] = f"makes no progress on {' and '.join(life.devices)}"
            self._release(life, now)
        self._reached.update((name, life.reached) for name, life in self._lives.items() if life.reached is not None)
        waiting = {name: reasons.get(name, "no device ever became free") for name in self._lives}
        return Outcome(
            self._arrivals,
            self._completion,
            self._reached,
            self._refused,
            waiting,
            tuple(self._intervals),
            tuple(self._usage.occupancy),
            self._usage.device_seconds,
            self._decisions,
            self._switches,
            {} if self._tuner is None else dict(self._tuner.ratios),
            self._decision_seconds,
            self._longest,
        )
