"""The simulation of a study: the state machine of a live study with a virtual back end and a virtual clock."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, product
from math import inf
from pathlib import Path
from typing import Any

from shoal.backends.virtual import SlowDown, Virtual
from shoal.cluster.monitor import Condition
from shoal.core.command import KillJob, StartJob, Step, StopJob, UpdateJob
from shoal.core.device import Cluster, Node
from shoal.core.errors import DeviceError, PolicyError
from shoal.core.event import Outcome
from shoal.core.job import Purpose, WorkerContext
from shoal.core.request import Request
from shoal.core.rows import DeviceRow, JobRow, Proposal, ReportRow, Row, StudyValue, TrialRow
from shoal.core.trial import TrialState
from shoal.cost.history import History
from shoal.journal.writer import Journal
from shoal.planner.grouping import Grouping
from shoal.reporting.savings import savings
from shoal.schedule.base import JobView, Plan, Policy
from shoal.simulate.result import Interval, SimulationResult
from shoal.simulate.workload import SimulatedWorkload
from shoal.spec import StudySpec
from shoal.study.actuation import carry_out
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceConditions, DeviceTracker
from shoal.study.event import Due, Event
from shoal.study.fleet import Fleet
from shoal.study.state import MIN_POLL_SECONDS, CoreConfig

__all__ = ["ClusterEvent", "Simulation"]

_MAX_TURNS = 1000
"""Limit of turns at one time, in addition to one for each trial; beyond it the policy starts and stops jobs forever."""


@dataclass(frozen=True)
class ClusterEvent:
    """A change of the cluster.

    Jobs on a failed device go on elsewhere from their last checkpoints; jobs on a removed device are stopped after a
    checkpoint.

    Args:
        at: Seconds from the start of the simulation.
    """

    at: float
    failed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[Node, ...] = ()


class Simulation:
    """The simulation of one study, from its start until no event is left.

    Args:
        measured: Whether the costs of trials are known at the start; else signatures and profiles come first.
        checkpoint_seconds: Seconds between two checkpoints of a job, at ends of epochs.
        tick: Seconds whose events are one turn of the engine's loop; see `Virtual`.
    """

    def __init__(
        self,
        workload: SimulatedWorkload,
        cluster: Cluster,
        policy: Policy,
        slowdown: SlowDown,
        *,
        events: Sequence[ClusterEvent] = (),
        grouping: Grouping | None = None,
        fuse: bool = True,
        measured: bool = True,
        checkpoint_seconds: float = inf,
        tick: float = 0.0,
    ) -> None:
        directory = Path("simulated")
        worker_context = WorkerContext(directory, b"", checkpoint_seconds=checkpoint_seconds)
        self._backend = Virtual(worker_context, workload, beat_seconds=inf, slowdown=slowdown, tick=tick)
        self._result = SimulationResult(clusters=[(0.0, cluster)])
        self._workload, self._policy = workload, _TimedPolicy(policy, self._result)
        self._events = deque(sorted(events, key=lambda event: event.at))
        self._arrivals = deque(sorted({at for source in workload.sources for at in source.arrivals}))
        self._study: dict[str, Any] = {}
        all_devices = Cluster((*cluster.nodes, *(node for event in events for node in event.added)))
        history = History("")
        for key, kind in (
            product(workload.keys, dict.fromkeys(device.kind for _, device in all_devices)) if measured else ()
        ):
            history.put(key.structure, key.data, key.batch_size, kind, workload.profile(key, kind))
        self._core = StudyCore(
            CoreConfig(
                directory,
                spec=StudySpec(metric="loss", mode="min", fuse=fuse),
                study=self._study,
                algorithm=workload,
                policy=self._policy,
                history=history,
                devices=DeviceTracker(
                    Fleet(cluster),
                    lambda names: all_devices.select(lambda device: device.name in names),
                    None,
                    directory,
                ),
                grouping=grouping or Grouping(),
                replan_seconds=inf,
                key=workload.key if measured else None,
                teams=True,
            )
        )
        self._conditions: dict[str, Condition] = {}
        self._segments: dict[int, str] = {}  # number of an unended trial -> name of its segment
        self._running: dict[str, tuple[StartJob, float]] = {}
        self._journal: Journal | None = None

    def run(self, directory: Path | None = None, policy: str = "") -> SimulationResult:
        """Run until the study is finished, or no event is left.

        Args:
            directory: Directory for the journal of the study, which has what that of a live one has; its times are
                those of a study that began at the call. None: there is no journal.
        """
        if directory is None:
            self._run()
        else:
            with closing(self._new_journal(directory, policy)) as self._journal:
                self._run()
                found = savings(self._journal, self._core.state.config.history)
                self._journal.put("savings", found and asdict(found))
                self._journal.put("finished", self._core.state.finished)
        for number, name in self._segments.items():
            self._result.waiting[name] = self._core.state.trials[number].reason or "makes no progress"
        return self._result

    def _new_journal(self, directory: Path, policy: str) -> Journal:
        spec = replace(self._core.state.config.spec, policy=policy)
        began = time.time() - self._backend.now
        journal = Journal.create(directory, spec, task=b"", algorithm=b"", clock=lambda: began + self._backend.now)
        step = Step(journal.clock())
        self._core.state.config.devices.write_changes(step)
        journal.write(step.rows)
        return journal

    def _run(self) -> None:
        previous, turns, was_stuck, state = -1.0, 0, False, self._core.state
        while not state.finished:
            now = self._backend.now
            previous, turns = now, turns + 1 if now == previous else 1
            if turns > _MAX_TURNS + len(self._segments):
                problem = f"{self._policy.policy!r} was asked {turns} times at {now:g} s, and time does not go on"
                raise PolicyError(f"{problem}: it starts what it stops")
            self._apply_due_changes(now)
            acted = sum([self._handle(due) for due in Due if due is not Due.PLAN or self._should_plan()])
            stuck = not acted and self._backend.idle and not self._events and not self._arrivals
            if stuck and (was_stuck or not state.has_wake_time):
                break
            was_stuck = stuck
            next_change = min(
                chain(islice(self._arrivals, 1), (event.at for event in islice(self._events, 1))), default=inf
            )
            until = min(next_change, max(state.wake, now + MIN_POLL_SECONDS))
            for event in self._backend.poll(until - now):
                self._handle(event)

    def _should_plan(self) -> bool:
        """Return whether to plan now; to plan for an idle study before an arrival would be an error."""
        state = self._core.state
        return not self._arrivals or bool(state.running) or state.trials.has_waiting()

    def _apply_due_changes(self, now: float) -> None:
        """Begin the searches, and apply the changes of the cluster, that are due."""
        self._workload.now = now
        while self._arrivals and self._arrivals[0] <= now:
            self._arrivals.popleft()
        while self._events and self._events[0].at <= now:
            event = self._events.popleft()
            added = tuple(device.name for node in event.added for device in node.devices)
            if event.removed:
                self._handle(Request(f"{len(self._events)} remove", "remove devices", event.removed))
            if added:
                self._handle(Request(f"{len(self._events)} add", "add devices", added))
            if event.failed or event.restored:
                for name in event.restored:
                    self._conditions.pop(name, None)
                self._conditions.update(dict.fromkeys(event.failed, Condition(healthy=False, reason="has failed")))
                self._handle(DeviceConditions(dict(self._conditions)))

    def _handle(self, event: Event) -> bool:
        """Pass an event to the state machine and carry out its commands; return whether a job was affected."""
        state = self._core.state
        try:
            step = self._core.step(event, self._backend.now, None if self._journal is None else self._journal.clock())
        except DeviceError:  # no waiting trial can ever start; the result has the reasons
            step = state.step
        if self._journal is not None:
            self._journal.write(step.rows)
        for row in step.rows:
            self._observe(row, self._backend.now)
        if any(isinstance(row, DeviceRow) for row in step.rows):
            self._result.clusters.append((self._backend.now, state.fleet.with_held_memory))
        for command in step.commands:
            if isinstance(command, StartJob) and command.job.purpose in (Purpose.TRAIN, Purpose.ASSIST):
                self._running[command.job.id] = command, self._backend.now
            if follow_up := carry_out(command, self._backend, state.config.directory):
                self._handle(follow_up)
        return any(isinstance(command, StartJob | UpdateJob | StopJob | KillJob) for command in step.commands)

    def _observe(self, row: Row, now: float) -> None:
        result = self._result
        match row:
            case Proposal():
                for trial in (trial for group in row.groups for trial in group.trials):
                    name = self._workload.label(trial.number)
                    if name in result.arrivals:
                        name = f"{name}@{self._core.state.trials[trial.number].target}"
                    self._segments[trial.number] = name
                    result.arrivals[name] = now
            case ReportRow():
                target = self._workload.source(row.report.trial).curves.target
                if target is not None and row.report.metrics.get("loss", inf) <= target:
                    result.reached.setdefault(self._workload.label(row.report.trial), now)
            case TrialRow() if row.state not in (TrialState.PENDING, TrialState.RUNNING):
                if row.number in self._segments:
                    result.completion[self._segments.pop(row.number)] = now
            case JobRow() if row.ended is not None and row.id in self._running:
                result.switches += row.outcome != Outcome.FINISHED and not row.assists
                self._end_interval(row.id, now)
            case StudyValue(key=key, value=value):
                self._study[key] = value

    def _end_interval(self, job: str, now: float) -> None:
        started, began = self._running.pop(job)
        members, demand = started.job.members, started.job.demand
        label = self._workload.label(members[0].trial.number)
        compute = 1.0 if demand is None or started.job.assists else demand.compute
        self._result.intervals.append(Interval(label, len(members), started.device.name, began, now, compute))


class _TimedPolicy(Policy):
    """A policy whose decisions are counted and timed in a result."""

    def __init__(self, policy: Policy, result: SimulationResult) -> None:
        self.policy, self._result = policy, result

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        began = time.perf_counter()
        plan = self.policy.plan(jobs, cluster, now)
        seconds = time.perf_counter() - began
        self._result.decisions += 1
        self._result.decision_seconds += seconds
        self._result.longest_decision = max(self._result.longest_decision, seconds)
        return plan
