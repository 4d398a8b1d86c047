"""Trains some configurations for a few steps, and lets the planner make jobs of them as in a search."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from torch import Tensor

from shoal.cluster.temporary import TemporaryFolder, remove_abandoned
from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Cluster, Node
from shoal.core.errors import TaskError
from shoal.core.event import Outcome, PackSpeedMeasured, Profiled
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.cost.history import History
from shoal.cost.store import ProfileStore
from shoal.dry_run.request import DryRunRequest
from shoal.dry_run.result import DryRun, DryRunPlan, Failed, planned
from shoal.planner.families import families, in_turns
from shoal.planner.grouping import Grouping
from shoal.planner.packing.base import Packing
from shoal.planner.packing.baselines import NoPacking
from shoal.planner.planner import Planner
from shoal.planner.planning_context import PROFILE_MEMBERS
from shoal.schedule.knapsack import Fifo
from shoal.worker.array_trainer import ArrayTrainer
from shoal.worker.failures import outcome_of, user_traceback
from shoal.worker.lane_scheduler import LaneScheduler
from shoal.worker.memory import give_back
from shoal.worker.profile import measure
from shoal.worker.run import prepare
from shoal.worker.trial_runtime import TrialRuntime
from shoal.worker.worker_state import WorkerState

__all__ = ["dry_run"]

_log = logging.getLogger("shoal.worker")

_JOB = "dry run"
"""Id of what measures."""

FETCH_SECONDS = 15.0
"""Longest time spent on fetching samples before anything is timed."""

LEAST_SECONDS, LIMIT_SECONDS = 0.5, 30.0
"""Shortest time for which arrays take turns, so that failures show; and the time limit of the choice of a way."""


def dry_run(asked: DryRunRequest, trials: Sequence[Trial], history: History, tell: Callable[[str], None]) -> DryRun:
    """Measure trials on the first device that was asked for, and plan them as if each were to train one epoch.

    Nothing is trained to any end, and nothing written but what was measured, for the searches to come. The threads of
    this process become those of a worker.

    Args:
        asked: the study.
        trials: of it, at least one.
        history: where it is written; what it knows already is measured anew.
        tell: given a line on what is under way.

    Raises:
        TaskError: the task breaks its contract.
    """
    remove_abandoned()
    with TemporaryFolder() as nothing:
        return _DryRunner(asked, history, tell, nothing.path).run(trials)


class _DryRunner:
    def __init__(self, asked: DryRunRequest, history: History, tell: Callable[[str], None], directory: Path) -> None:
        self._asked = asked
        self._history = history
        self._store = ProfileStore(history, asked.spec.get("task", ""))
        self._tell = tell
        self._node, self._device = next(iter(asked.cluster))
        self._worker_state, self._signature_builder = prepare(self._device, WorkerContext(directory, asked.task))
        self._failures: dict[str, list[int]] = {}
        self._unmeasurable: set[tuple[FusionKey, str]] = set()
        self._packs: dict[tuple[tuple[int, ...], ...], str] = {}
        """By numbers of the trials of each array: why these cannot share a process, "" if they can."""

    def run(self, trials: Sequence[Trial]) -> DryRun:
        self._tell(f"looking at {len(trials)} configurations")
        members = self._look(trials)
        for place, (key, some) in enumerate(members.items(), start=1):
            self._tell(f"measuring structure {place} of {len(members)} on {self._device.name}")
            some[:] = self._measure(key, some)
        waiting = sorted(((member, key) for key, some in members.items() for member in some), key=_number)
        fuse, packing = self._asked.spec["fuse"], self._asked.packing
        for family, several in families(waiting).items() if fuse else ():
            self._tell(f"measuring {len({key for _, key in several})} structures as one array")
            self._measure_family(family, in_turns(several))
        chosen = self._plan(waiting, fuse, packing)
        while new := [group for group in chosen.jobs if len(group) > 1 and _numbers(group) not in self._packs]:
            for group in new:
                self._try_pack(group)
            chosen = self._plan(waiting, fuse, packing)  # with what that showed
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

    def _look(self, trials: Sequence[Trial]) -> dict[FusionKey, list[Member]]:
        """The trials by their structure, but for those that cannot be looked at."""
        members: dict[FusionKey, list[Member]] = {}
        for trial in trials:
            try:
                key = self._signature_builder.key(trial)
            except (Exception, SystemExit) as error:  # not hidden: it is told with the trial
                self._fail([trial], error)
            else:
                members.setdefault(key, []).append(Member(trial, 0, 1))
        return members

    def _measure(self, key: FusionKey, members: Sequence[Member]) -> list[Member]:
        """Measure a structure; returns the members without those with which it cannot be, of which it is noted why."""
        try:
            self._observe(Array(key, tuple(members[:PROFILE_MEMBERS])))
        except (Exception, SystemExit) as error:  # not hidden: it is told with the trials
            left = [member for member in members if self._measure(key, [member])] if len(members) > 1 else []
            if 0 < len(left) < len(members):
                return self._measure(key, left)
            if left or len(members) == 1:
                self._fail([member.trial for member in members], error)
            return []
        return list(members)

    def _measure_family(self, family: FusionKey, members: Sequence[Member]) -> None:
        """Measure members of several structures as one array; where that fails, they are planned as several."""
        try:
            self._observe(Array(family, tuple(members[:PROFILE_MEMBERS])))
        except TaskError:
            raise
        except (Exception, SystemExit) as error:  # not hidden: it is told in the log
            self._unmeasurable.add((family, self._device.kind))
            _log.warning("structures could not be measured as one array:\n%s", user_traceback(error))

    def _observe(self, array: Array) -> None:
        """Measure an array, and note in the profile store what that shows."""
        task, sets, device = self._worker_state.task, self._worker_state.sets, self._worker_state.device
        _fetch_kept(array, self._worker_state)
        profile = measure(task, sets, array, device, self._device.memory)
        self._store.observe(Profiled(_JOB, array.key, profile), Job(_JOB, (array,), Purpose.PROFILE), self._device)

    def _fail(self, trials: Sequence[Trial], error: BaseException) -> None:
        """Note why trials could not be measured.

        Raises:
            TaskError: the task breaks its contract.
        """
        numbers = [trial.number for trial in trials]
        if isinstance(error, TaskError):
            met = f"configuration {numbers[0]}, {dict(trials[0].config)}" if len(trials) == 1 else f"one of {numbers}"
            raise TaskError(f"{error}; it was met with {met}") from error
        reason = _in_short(error)
        if reason not in self._failures:
            _log.warning("trials %s could not be measured:\n%s", numbers, user_traceback(error))
        self._failures.setdefault(reason, []).extend(numbers)

    def _plan(self, waiting: Sequence[tuple[Member, FusionKey]], fuse: bool, packing: Packing) -> DryRunPlan:
        """The jobs that the planner starts on the device one after another, each as soon as the one before is over."""
        ids = map("job-{}".format, count())
        spec = self._asked.spec
        grouping = Grouping(packing, self._history.pack_speeds, self._asked.space.axes(), spec["seed"])
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

    def _try_pack(self, arrays: Sequence[Array]) -> None:
        """Measure arrays in one process; whether they can share one is noted."""
        self._tell(f"measuring {len(arrays)} arrays in one process")
        group = _numbers(arrays)
        try:
            pack_speed = _measure_pack_speed(arrays, self._worker_state)
        except TaskError as error:
            raise TaskError(f"{error}; it was met with the configurations {group} in one process") from error
        except (Exception, SystemExit) as error:  # not hidden: it is told with the arrays
            _log.warning("arrays could not be measured together:\n%s", user_traceback(error))
            self._packs[group] = _in_short(error)
        else:
            self._packs[group] = ""
            if pack_speed < 1:
                seen = PackSpeedMeasured(_JOB, tuple(array.key for array in arrays), pack_speed)
                self._store.observe(seen, Job(_JOB, tuple(arrays)), self._device)


def _fetch_kept(array: Array, worker_state: WorkerState) -> None:
    """Have the samples fetched that are kept from then on, as in all epochs but the first: fetching disturbs steps."""
    began = time.perf_counter()
    for each in worker_state.sets.of(array.members[0].trial.config):
        if each.sharing == "kept" and each.fetched < each.samples:
            for _ in each.walk(array.key.batch_size):
                if time.perf_counter() - began > FETCH_SECONDS:
                    return


def _numbers(group: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the trials of each array."""
    return tuple(tuple(member.trial.number for member in array.members) for array in group)


def _number(waiting: tuple[Member, FusionKey]) -> int:
    return waiting[0].trial.number


def _in_short(error: BaseException) -> str:
    """An error on one line."""
    if outcome_of(error) is Outcome.OUT_OF_MEMORY:
        return "there is no memory for it"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _measure_pack_speed(arrays: Sequence[Array], worker_state: WorkerState) -> float:
    """Let arrays take turns until the fastest way is found, as a training job does.

    Args:
        arrays: at least two, of the same data, with their profiles; all members from their very start.
        worker_state: of this process.

    Returns:
        Seconds of their steps in that way over those of array after array; 1 where there is no other way.

    Raises:
        Exception: what the task raised.
    """
    lanes = [_UncheckedTrainer("", _endless(array), worker_state) for array in arrays]
    turns = LaneScheduler(worker_state.device)
    began = time.perf_counter()

    def elapsed() -> float:
        return time.perf_counter() - began

    while elapsed() < (LEAST_SECONDS if turns.way else LIMIT_SECONDS):
        for lane in lanes:
            while not lane.ready:
                lane.prepare()
        for failure in turns.round(lanes, lambda: elapsed() >= LIMIT_SECONDS):
            raise failure.error
        for lane in lanes:
            lane.events.clear()  # nobody waits for what they have to tell
    seconds, way = turns.seconds, turns.way
    del lanes, turns
    give_back(worker_state.device)
    return seconds[way] / seconds["turns"] if way is not None and "turns" in seconds else 1.0


class _UncheckedTrainer(ArrayTrainer):
    """A lane in which trials go on whatever their loss is: a step takes as long when it is no number. They go on beyond
    their budgets, too, where a schedule may have ended.
    """

    def _runtime(self, member: Member) -> TrialRuntime:
        return replace(super()._runtime(member), scheduler=None)

    def _judge(self, finite: Tensor) -> None:
        pass


def _endless(array: Array) -> Array:
    """The array with no end in sight, and never compiled: what is asked is what an epoch takes from the first step."""
    members = tuple(replace(member, target=sys.maxsize) for member in array.members)
    profile = None if array.profile is None else replace(array.profile, compiled_gain={1: 1.0})
    return replace(array, members=members, profile=profile)
