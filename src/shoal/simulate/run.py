"""Simulates a study: the state machine of a live one, over a virtual back end and a virtual clock."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from math import inf
from pathlib import Path
from typing import Any

from shoal.backends.virtual import SlowDown, Virtual
from shoal.cluster.monitor import Condition
from shoal.core import command
from shoal.core.device import Cluster, Node
from shoal.core.errors import DeviceError, PolicyError
from shoal.core.event import Outcome as End
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.objective import Objective
from shoal.core.request import Request
from shoal.core.trial import TrialState
from shoal.cost.history import History
from shoal.planner.grouping import Grouping
from shoal.planner.planner import LEAST_SECONDS
from shoal.schedule.action import Plan
from shoal.schedule.base import JobView, Policy
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.simulate.result import Interval, SimulationResult
from shoal.simulate.workload import SimulatedWorkload
from shoal.study.actuation import carry_out
from shoal.study.core import StudyCore
from shoal.study.devices import DevicesSeen, DeviceTracker
from shoal.study.event import Due, Event
from shoal.study.fleet import Fleet
from shoal.study.state import Given

__all__ = ["ClusterEvent", "Simulation"]

_ROUNDS = 1000
"""Turns at one moment, beside one for each trial, after which a policy is taken to start what it stops for ever."""


@dataclass(frozen=True)
class ClusterEvent:
    """Devices that come or go.

    Jobs on a device that fails go on elsewhere from their last checkpoints; those on one that is removed are stopped
    after a checkpoint.

    Args:
        at: seconds from the start of the simulation.
        failed: names of devices that do not answer from now on.
        restored: names of devices that answer again.
        removed: names of devices that a user takes away.
        added: nodes that join the cluster.
    """

    at: float
    failed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[Node, ...] = ()


class Simulation:
    """One study, from its beginning to where nothing more can happen.

    Args:
        searches: what is tried, and what it takes.
        cluster: at the start.
        policy: decides which job runs where.
        slowdown: how fast jobs are that share a device.
        events: changes of the cluster.
        tuner: finds how many times the compute of devices may be promised; by default it leaves them as they are.
        grouping: decides which arrays share a process.
        fuse: whether trials may share an array.
        measured: whether what trials take is known beforehand; else their models are looked at and measured first.
        checkpoint_seconds: between two checkpoints of a job, which are made at the ends of epochs.
        tick: seconds whose events are one turn of the engine's loop; see `Virtual`.
    """

    def __init__(
        self,
        searches: SimulatedWorkload,
        cluster: Cluster,
        policy: Policy,
        slowdown: SlowDown,
        *,
        events: Sequence[ClusterEvent] = (),
        tuner: OversubscriptionTuner | None = None,
        grouping: Grouping | None = None,
        fuse: bool = True,
        measured: bool = True,
        checkpoint_seconds: float = inf,
        tick: float = 0.0,
    ) -> None:
        directory = Path("simulated")
        worker_context = WorkerContext(directory, b"", checkpoint_seconds=checkpoint_seconds)
        self._world = Virtual(worker_context, searches, beat_seconds=inf, slowdown=slowdown, tick=tick)
        self._searches, self._policy = searches, _TimedPolicy(policy)
        self._events = deque(sorted(events, key=lambda event: event.at))
        self._arrivals = deque(sorted({at for source in searches.sources for at in source.arrivals}))
        self._tuner = tuner or OversubscriptionTuner(kinds=())
        self._study: dict[str, Any] = {}
        whole = Cluster((*cluster.nodes, *(node for event in events for node in event.added)))
        history = History("")
        for key, kind in product(searches.keys, dict.fromkeys(device.kind for _, device in whole)) if measured else ():
            history.put(key.structure, key.data, key.batch_size, kind, searches.profile(key, kind))
        self._core = StudyCore(
            Given(
                directory,
                study=self._study,
                objectives=(Objective("loss", "min"),),
                algorithm=searches,
                policy=self._policy,
                history=history,
                devices=DeviceTracker(Fleet(cluster), partial(_found, whole), None, directory),
                retries=2,
                tuner=self._tuner,
                grouping=grouping or Grouping(),
                fuse=fuse,
                replan_seconds=inf,
                key=searches.key if measured else None,
            )
        )
        self._lost: dict[str, Condition] = {}
        self._stretches: dict[int, str] = {}  # of the trials that are being trained or wait for that, by number
        self._running: dict[str, tuple[command.JobStarted, float]] = {}
        self._outcome = SimulationResult(clusters=[(0.0, cluster)])

    def run(self) -> SimulationResult:
        """Go on until all is decided, or nothing more can happen.

        Raises:
            PolicyError: the policy made an illegal plan, or stops what it starts for ever.
            ScenarioError: a table of measurements knows nothing of a job.
        """
        then, rounds, was_stuck, state = -1.0, 0, False, self._core.state
        while not state.finished:
            now = self._world.now
            then, rounds = now, rounds + 1 if now == then else 1
            if rounds > _ROUNDS + len(self._stretches):
                asked = f"{self._policy.policy!r} was asked {rounds} times at {now:g} s, and time does not go on"
                raise PolicyError(f"{asked}: it starts what it stops")
            self._arrive(now)
            acted = sum([self._happen(due) for due in Due if due is not Due.PLAN or self._may_plan()])
            stuck = not acted and self._world.idle and not self._events and not self._arrivals
            if stuck and (was_stuck or not state.planner.sleeps):
                break
            was_stuck = stuck
            coming = min(chain(islice(self._arrivals, 1), (event.at for event in islice(self._events, 1))), default=inf)
            until = min(coming, max(state.planner.wake, now + LEAST_SECONDS))
            for event in self._world.poll(until - now):
                self._happen(event)
        waiting = {name: state.trials[number].reason or "makes no progress" for number, name in self._stretches.items()}
        return replace(
            self._outcome,
            waiting=waiting,
            oversubscription=dict(self._tuner.ratios),
            decisions=self._policy.asked,
            decision_seconds=self._policy.seconds,
            longest_decision=self._policy.longest,
        )

    def _may_plan(self) -> bool:
        """Whether there is anything to plan; a study with nothing to do that is not finished would be at fault."""
        state = self._core.state
        return not self._arrivals or bool(state.running) or state.trials.has_waiting()

    def _arrive(self, now: float) -> None:
        """Let what comes now be there: searches, and changes of the cluster."""
        self._searches.now = now
        while self._arrivals and self._arrivals[0] <= now:
            self._arrivals.popleft()
        while self._events and self._events[0].at <= now:
            event = self._events.popleft()
            added = tuple(device.name for node in event.added for device in node.devices)
            if event.removed:
                self._happen(Request(f"{len(self._events)} remove", "remove devices", event.removed))
            if added:
                self._happen(Request(f"{len(self._events)} add", "add devices", added))
            if event.failed or event.restored:
                for name in event.restored:
                    self._lost.pop(name, None)
                self._lost.update(dict.fromkeys(event.failed, Condition(healthy=False, reason="has failed")))
                self._happen(DevicesSeen(dict(self._lost)))

    def _happen(self, event: Event) -> bool:
        """Let an event happen; whether anything was done about it."""
        state = self._core.state
        try:
            step = self._core.step(event, self._world.now)
        except DeviceError:  # what waits can never start; the outcome tells why
            step = state.step
        for record in step.records:
            self._note(record, self._world.now)
        for order in step.commands:
            if follows := carry_out(order, self._world, state.given.directory):
                self._happen(follows)
        acts = command.StartJob | command.UpdateJob | command.StopJob | command.KillJob
        return any(isinstance(order, acts) for order in step.commands)

    def _note(self, record: command.Record, now: float) -> None:
        """Keep what a step records, as far as the outcome tells of it."""
        outcome = self._outcome
        match record:
            case command.GroupsProposed():
                for trial in (trial for group in record.groups for trial in group.trials):
                    name = self._searches.label(trial.number)
                    if name in outcome.arrivals:
                        name = f"{name}@{self._core.state.trials[trial.number].target}"
                    self._stretches[trial.number] = name
                    outcome.arrivals[name] = now
            case command.TrialsReported():
                for report in record.reports:
                    target = self._searches.source(report.trial).curves.target
                    if target is not None and report.metrics.get("loss", inf) <= target:
                        outcome.reached.setdefault(self._searches.label(report.trial), now)
                    if report.state is not TrialState.RUNNING:
                        self._end(report.trial, now)
            case command.Decided():
                for decision in record.decisions:
                    self._end(decision.trial, now)
            case command.JobStarted(job=Job(purpose=Purpose.TRAIN)):
                self._running[record.job.id] = record, now
            case command.JobEnded() if record.job in self._running:
                outcome.switches += record.outcome is not End.FINISHED
                self._leave(record.job, now)
            case command.DevicesChanged():
                outcome.clusters.append((now, record.cluster))
            case command.StudyChanged():
                self._study[record.key] = record.value

    def _end(self, trial: int, now: float) -> None:
        if (name := self._stretches.pop(trial, None)) is not None:
            self._outcome.completion[name] = now

    def _leave(self, job: str, now: float) -> None:
        """A job has left its devices."""
        started, began = self._running.pop(job)
        members, demand = started.job.members, started.job.demand
        label = self._searches.label(members[0].trial.number)
        for device in (started.device, *started.job.helpers):
            compute = 1.0 if demand is None or started.job.helpers else demand.compute
            self._outcome.intervals.append(Interval(label, len(members), device, began, now, compute))


class _TimedPolicy(Policy):
    """A policy, and what it takes to decide."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.asked, self.seconds, self.longest = 0, 0.0, 0.0

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        began = time.perf_counter()
        plan = self.policy.plan(jobs, cluster, now)
        took = time.perf_counter() - began
        self.asked, self.seconds, self.longest = self.asked + 1, self.seconds + took, max(self.longest, took)
        return plan


def _found(whole: Cluster, devices: str | Sequence[str]) -> Cluster:
    """The devices of these names."""
    nodes = (replace(x, devices=tuple(d for d in x.devices if d.name in devices)) for x in whole.nodes)
    return Cluster(tuple(node for node in nodes if node.devices))
