"""Dry run: profiles some configurations with real steps, and plans their jobs as a search would."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from shoal.cluster.temporary import TemporaryFolder, remove_abandoned
from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Cluster, Node
from shoal.core.errors import TaskError
from shoal.core.event import Outcome, Profiled, RelativeTimeMeasured
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.cost.history import History
from shoal.cost.store import ProfileStore
from shoal.dry_run.request import DryRunRequest
from shoal.dry_run.result import DryRun, DryRunPlan, Failed, planned
from shoal.planner.families import families, round_robin
from shoal.planner.grouping import Grouping
from shoal.planner.packing.base import NoPacking, Packing
from shoal.planner.planner import Planner
from shoal.planner.planning_context import PROFILE_MEMBERS
from shoal.schedule.knapsack import Fifo
from shoal.worker.array_trainer import ArrayTrainer
from shoal.worker.failures import outcome_of, user_traceback
from shoal.worker.lane_scheduler import LaneScheduler
from shoal.worker.memory import release_cached_memory
from shoal.worker.profile import measure
from shoal.worker.run import prepare
from shoal.worker.worker_state import WorkerState

__all__ = ["dry_run"]

_log = logging.getLogger("shoal.worker")

_JOB = "dry run"
"""Job id of the measurements."""

FETCH_SECONDS = 15.0
"""Longest time spent on fetching samples before anything is timed."""

MIN_POLL_SECONDS, LIMIT_SECONDS = 0.5, 30.0
"""Shortest time for which arrays take turns, so that failures show; and the time limit of the choice of a way."""


def dry_run(
    request: DryRunRequest, trials: Sequence[Trial], history: History, on_progress: Callable[[str], None]
) -> DryRun:
    """Profile trials on the first requested device, and plan them as if each were to train one epoch.

    No trial is trained to its budget. Only profiles are written, for later searches. The number of threads of this
    process is set as in a worker.

    Args:
        request: The requested study.
        trials: Trials of the study, at least one.
        history: The job history for the profiles; known structures are measured again.
        on_progress: Receiver of progress lines.

    Raises:
        TaskError: The task breaks its contract.
    """
    remove_abandoned()
    with TemporaryFolder() as temporary:
        return _DryRunner(request, history, on_progress, temporary.path).run(trials)


class _DryRunner:
    def __init__(
        self, request: DryRunRequest, history: History, on_progress: Callable[[str], None], directory: Path
    ) -> None:
        self._request = request
        self._history = history
        self._store = ProfileStore(history, request.spec.get("task", ""))
        self._on_progress = on_progress
        self._node, self._device = next(iter(request.cluster))
        self._worker_state, self._signature_builder = prepare(self._device, WorkerContext(directory, request.task))
        self._failures: dict[str, list[int]] = {}
        self._unmeasurable: set[tuple[FusionKey, str]] = set()
        self._packs: dict[tuple[tuple[int, ...], ...], str] = {}
        """Numbers of the trials of each array -> reason why the arrays cannot share a process; "" if they can."""

    def run(self, trials: Sequence[Trial]) -> DryRun:
        self._on_progress(f"looking at {len(trials)} configurations")
        members = self._group_by_structure(trials)
        for number, (key, group) in enumerate(members.items(), start=1):
            self._on_progress(f"measuring structure {number} of {len(members)} on {self._device.name}")
            group[:] = self._measure(key, group)
        waiting = sorted(
            ((member, key) for key, group in members.items() for member in group), key=lambda each: each[0].trial.number
        )
        fuse, packing = self._request.spec["fuse"], self._request.packing
        for family, members_of_family in families(waiting).items() if fuse else ():
            self._on_progress(f"measuring {len({key for _, key in members_of_family})} structures as one array")
            self._measure_family(family, round_robin(members_of_family))
        chosen = self._plan(waiting, fuse, packing)
        while unmeasured := [group for group in chosen.jobs if len(group) > 1 and _numbers(group) not in self._packs]:
            for arrays in unmeasured:
                self._measure_pack(arrays)
            chosen = self._plan(waiting, fuse, packing)  # with the new measurements
        for numbers, reason in chosen.refused:
            self._failures.setdefault(reason, []).extend(numbers)
        plans = {
            "apart": self._plan(waiting, False, NoPacking()),
            "packed": self._plan(waiting, False, packing),
            "fused": self._plan(waiting, fuse, NoPacking()),
            "chosen": chosen,
        }
        alone = {reason: group for group, reason in self._packs.items() if reason}
        return DryRun(
            self._device,
            planned(chosen, packing, fuse, alone),
            {name: plan.seconds(shared=name != "apart") for name, plan in plans.items()},
            tuple(Failed(tuple(numbers), reason) for reason, numbers in self._failures.items()),
        )

    def _group_by_structure(self, trials: Sequence[Trial]) -> dict[FusionKey, list[Member]]:
        """Return the trials by structure, without trials whose signature cannot be built."""
        members: dict[FusionKey, list[Member]] = {}
        for trial in trials:
            try:
                key = self._signature_builder.key(trial)
            except (Exception, SystemExit) as error:  # reported with the trial
                self._fail([trial], error)
            else:
                members.setdefault(key, []).append(Member(trial, 0, 1))
        return members

    def _measure(self, key: FusionKey, members: Sequence[Member]) -> list[Member]:
        """Profile a structure; return the members that can be profiled, and record the failures of the others."""
        try:
            self._observe(Array(key, tuple(members[:PROFILE_MEMBERS])))
        except (Exception, SystemExit) as error:  # reported with the trials
            measurable = [member for member in members if self._measure(key, [member])] if len(members) > 1 else []
            if 0 < len(measurable) < len(members):
                return self._measure(key, measurable)
            if measurable or len(members) == 1:
                self._fail([member.trial for member in members], error)
            return []
        return list(members)

    def _measure_family(self, family: FusionKey, members: Sequence[Member]) -> None:
        """Profile members of several structures as one array; after a failure they are planned as several arrays."""
        try:
            self._observe(Array(family, tuple(members[:PROFILE_MEMBERS])))
        except TaskError:
            raise
        except (Exception, SystemExit) as error:  # reported in the log
            self._unmeasurable.add((family, self._device.kind))
            _log.warning("structures could not be measured as one array:\n%s", user_traceback(error))

    def _observe(self, array: Array) -> None:
        """Profile an array, and store its profile."""
        task, sets, device = self._worker_state.task, self._worker_state.sets, self._worker_state.device
        _fetch_kept(array, self._worker_state)
        profile = measure(task, sets, array, device, self._device.memory)
        self._store.observe(Profiled(_JOB, array.key, profile), Job(_JOB, (array,), Purpose.PROFILE), self._device)

    def _fail(self, trials: Sequence[Trial], error: BaseException) -> None:
        """Note the failure of trials."""
        numbers = [trial.number for trial in trials]
        if isinstance(error, TaskError):
            place = f"configuration {numbers[0]}, {dict(trials[0].config)}" if len(trials) == 1 else f"one of {numbers}"
            raise TaskError(f"{error}; it was met with {place}") from error
        reason = _one_line(error)
        if reason not in self._failures:
            _log.warning("trials %s could not be measured:\n%s", numbers, user_traceback(error))
        self._failures.setdefault(reason, []).extend(numbers)

    def _plan(self, waiting: Sequence[tuple[Member, FusionKey]], fuse: bool, packing: Packing) -> DryRunPlan:
        """Return the jobs that the planner starts on the device one after another."""
        ids = map("job-{}".format, count())
        spec = self._request.spec
        grouping = Grouping(packing, self._history.relative_times, self._request.space.axes(), spec["seed"])
        cluster = Cluster((Node(self._node.name, self._node.cores, (self._device,)),))
        alone = {number for group, reason in self._packs.items() if reason for lane in group for number in lane}
        plan = DryRunPlan(self._device, self._store.estimate, grouping)
        while waiting:
            planner = Planner(Fifo(), self._store.estimate, ids.__next__, elastic=False, grouping=grouping, fuse=fuse)
            placement = planner.plan(waiting, [], cluster, 0.0, alone=alone, unmeasurable=self._unmeasurable)
            started = [job.arrays for job, _ in placement.starts]
            if not started:
                plan.refused += [((number,), reason) for number, reason in placement.refusals.items()]
                return plan
            plan.jobs += started
            begun = {member.trial.number for arrays in started for array in arrays for member in array.members}
            waiting = [(member, key) for member, key in waiting if member.trial.number not in begun]
        return plan

    def _measure_pack(self, arrays: Sequence[Array]) -> None:
        """Measure arrays in one process, and note whether they can share one."""
        self._on_progress(f"measuring {len(arrays)} arrays in one process")
        group = _numbers(arrays)
        try:
            relative_time = _measure_relative_time(arrays, self._worker_state)
        except TaskError as error:
            raise TaskError(f"{error}; it was met with the configurations {group} in one process") from error
        except (Exception, SystemExit) as error:  # reported with the arrays
            _log.warning("arrays could not be measured together:\n%s", user_traceback(error))
            self._packs[group] = _one_line(error)
        else:
            self._packs[group] = ""
            if relative_time < 1:
                seen = RelativeTimeMeasured(_JOB, tuple(array.key for array in arrays), relative_time)
                self._store.observe(seen, Job(_JOB, tuple(arrays)), self._device)


def _fetch_kept(array: Array, worker_state: WorkerState) -> None:
    """Fetch samples that are kept in memory before timing, since fetching would disturb the steps."""
    began = time.perf_counter()
    for each in worker_state.sets.of(array.members[0].trial.config):
        if each.sharing == "kept" and each.fetched < each.samples:
            for _ in each.iterate(array.key.batch_size):
                if time.perf_counter() - began > FETCH_SECONDS:
                    return


def _numbers(group: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the trials of each array."""
    return tuple(tuple(member.trial.number for member in array.members) for array in group)


def _one_line(error: BaseException) -> str:
    """Return an error on one line."""
    if outcome_of(error) is Outcome.OUT_OF_MEMORY:
        return "out of memory"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _measure_relative_time(arrays: Sequence[Array], worker_state: WorkerState) -> float:
    """Let arrays take turns until the fastest way is found, as a training job does; no result of the steps is kept."""
    lanes = [ArrayTrainer("", _without_end(array), worker_state, timing_only=True) for array in arrays]
    scheduler = LaneScheduler(worker_state.device)
    began = time.perf_counter()

    def elapsed() -> float:
        return time.perf_counter() - began

    while elapsed() < (MIN_POLL_SECONDS if scheduler.schedule else LIMIT_SECONDS):
        for lane in lanes:
            while not lane.ready:
                lane.prepare()
        for failure in scheduler.round(lanes, lambda: elapsed() >= LIMIT_SECONDS):
            raise failure.error
        for lane in lanes:
            lane.events.clear()  # nothing reads these events
    seconds, schedule = scheduler.seconds, scheduler.schedule
    del lanes, scheduler
    release_cached_memory(worker_state.device)
    return seconds[schedule] / seconds["turns"] if schedule is not None and "turns" in seconds else 1.0


def _without_end(array: Array) -> Array:
    """Return the array without an end, and never compiled, since epochs are timed from the first step."""
    members = tuple(replace(member, target=sys.maxsize) for member in array.members)
    profile = None if array.profile is None else replace(array.profile, compiled_gain={1: 1.0})
    return replace(array, members=members, profile=profile)
