"""Trains some configurations for a few steps, alone, fused and packed, and lets the planner say what it would do."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.cluster.temporary import TemporaryFolder, remove_abandoned
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.errors import TaskError
from shoal.core.event import Outcome, PackSpeedMeasured, Profiled
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.cost.estimate import step_seconds
from shoal.cost.history import History
from shoal.cost.store import ProfileStore
from shoal.dry_run.company import fetch_kept, measure_company, measure_switching
from shoal.dry_run.reasons import Reasons
from shoal.dry_run.request import Asked
from shoal.dry_run.result import Company, Failed, Measured, Rehearsal
from shoal.planner.candidates import candidate
from shoal.planner.grouping import Grouping
from shoal.planner.packing.base import Candidate
from shoal.planner.packing.groups import filled
from shoal.planner.partition import partition
from shoal.planner.turn import PROFILE_MEMBERS
from shoal.worker.outcome import outcome_of, user_traceback
from shoal.worker.profile import measure
from shoal.worker.run import prepare

__all__ = ["rehearse"]

_log = logging.getLogger("shoal.worker")

_JOB = "dry run"
"""Id of what measures."""


def rehearse(asked: Asked, trials: Sequence[Trial], history: History, tell: Callable[[str], None]) -> Rehearsal:
    """Measure trials on the first device that was asked for, each as if it were to train one epoch.

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
        return _Rehearser(asked, history, tell, nothing.path).run(trials)


class _Rehearser:
    def __init__(self, asked: Asked, history: History, tell: Callable[[str], None], directory: Path) -> None:
        self._asked = asked
        self._store = ProfileStore(history, asked.spec.get("task", ""))
        self._tell = tell
        self._device: Device = next(device for _, device in asked.cluster)
        self._workshop, self._describer = prepare(self._device, WorkerContext(directory, asked.task))
        self._failures: dict[str, list[int]] = {}
        self._companies: dict[tuple[tuple[int, ...], ...], Company] = {}
        axes = asked.space.axes()
        self._grouping = Grouping(asked.packing, history.paces, axes, asked.spec["seed"])

    def run(self, trials: Sequence[Trial]) -> Rehearsal:
        self._tell(f"looking at {len(trials)} configurations")
        members = self._look(trials)
        for place, (key, some) in enumerate(members.items(), start=1):
            self._tell(f"measuring structure {place} of {len(members)} on {self._device.name}")
            some[:] = self._measure(key, some)
        waiting = sorted(((member, key) for key, some in members.items() for member in some), key=_number)
        measured = [each for array in self._arrays(waiting) if (each := self._switched(array)) is not None]
        arrays = [each.array for each in measured]
        groups = self._groups(arrays)
        companies = tuple(each for each in self._companies.values())
        unfused = self._unfused(arrays)
        index_of = {id(array): index for index, array in enumerate(arrays)}
        indices = tuple(tuple(index_of[id(array)] for array in group) for group in groups)
        candidates = self._candidates(arrays)
        scene = self._grouping.scene(candidates, [self._device], {})
        fuse = self._asked.spec["fuse"]
        reasons = Reasons(measured, candidates, indices, companies, scene, self._asked.packing, self._device, fuse)
        return Rehearsal(
            self._device,
            tuple(measured),
            indices,
            tuple(map(reasons.of, range(len(arrays)))),
            companies,
            unfused,
            tuple(Failed(tuple(numbers), reason) for reason, numbers in self._failures.items()),
        )

    def _look(self, trials: Sequence[Trial]) -> dict[FusionKey, list[Member]]:
        """The trials by their structure, but for those that cannot be looked at."""
        members: dict[FusionKey, list[Member]] = {}
        for trial in trials:
            try:
                key = self._describer.key(trial)
            except (Exception, SystemExit) as error:  # not hidden: it is told with the trial
                self._fail([trial], error)
            else:
                members.setdefault(key, []).append(Member(trial, 0, 1))
        return members

    def _measure(self, key: FusionKey, members: Sequence[Member]) -> list[Member]:
        """Measure a structure; returns the members without those with which it cannot be, of which it is noted why."""
        task, sets, device = self._workshop.task, self._workshop.sets, self._workshop.device
        array = Array(key, tuple(members[:PROFILE_MEMBERS]))
        try:
            fetch_kept(array, self._workshop)
            profile = measure(task, sets, array, device, self._device.memory)
        except (Exception, SystemExit) as error:  # not hidden: it is told with the trials
            left = [member for member in members if self._measure(key, [member])] if len(members) > 1 else []
            if 0 < len(left) < len(members):
                return self._measure(key, left)
            if left or len(members) == 1:
                self._fail([member.trial for member in members], error)
            return []
        self._store.observe(Profiled(_JOB, key, profile), Job(_JOB, (array,), Purpose.PROFILE), self._device)
        return list(members)

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

    def _arrays(self, waiting: Sequence[tuple[Member, FusionKey]]) -> list[Array]:
        alone = set() if self._asked.spec["fuse"] else {member.trial.number for member, _ in waiting}
        arrays = partition(waiting, self._store.estimate, [self._device], {}, alone)
        return [replace(array, profile=self._profile(array.key)) for array in arrays]

    def _profile(self, key: FusionKey) -> Profile:
        profile = self._store.estimate(key, self._device.kind)
        assert profile is not None, "it was measured"
        return profile

    def _switched(self, array: Array) -> Measured | None:
        """With what a change to it costs; None, and it is noted why, where not all of its trials can be built."""
        profile, members = self._profile(array.key), len(array.members)
        lone = replace(array, members=array.members[:1])
        try:
            alone = measure_switching(lone, self._workshop, step_seconds(profile, 1))
            of_all = measure_switching(array, self._workshop, step_seconds(profile, members)) if members > 1 else alone
        except (Exception, SystemExit) as error:  # not hidden: it is told with the trials
            self._fail([member.trial for member in array.members], error)
            return None
        return Measured(array, profile, alone, of_all)

    def _groups(self, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """As a search would have them: what it tries is measured, and then planned anew with what that showed."""
        alone: set[int] = set()
        while True:
            groups = self._grouping.groups(arrays, self._store.estimate, [self._device], {}, alone)
            new = [group for group in groups if len(group) > 1 and _lanes(group) not in self._companies]
            if not new:
                return groups
            for group in new:
                company = self._companies[_lanes(group)] = self._company(group)
                if company.error:
                    alone.update(company.trials)
                elif company.way is not None:
                    seen = PackSpeedMeasured(_JOB, tuple(array.key for array in group), company.pace)
                    self._store.observe(seen, Job(_JOB, group), self._device)

    def _unfused(self, arrays: Sequence[Array]) -> tuple[Company, ...]:
        """Every trial a lane by itself, as many in a process as memory holds."""
        lone = [replace(array, members=(member,)) for array in arrays for member in array.members]
        candidates = self._candidates(lone)
        scene = self._grouping.scene(candidates, [self._device], {})
        companies: list[Company] = []
        left = list(range(len(lone)))
        while left:
            group = filled(left[0], left[1:], candidates, scene)
            left = [place for place in left if place not in group]
            lanes = tuple(lone[place] for place in group)
            if len(lanes) == 1:
                companies.append(Company(lanes))
            else:
                companies.append(self._companies.get(_lanes(lanes)) or self._company(lanes))
        return tuple(companies)

    def _company(self, arrays: Sequence[Array]) -> Company:
        self._tell(f"measuring {len(arrays)} lanes in one process")
        try:
            return measure_company(arrays, self._workshop)
        except TaskError as error:
            raise TaskError(f"{error}; it was met with the configurations {_lanes(arrays)} in one process") from error
        except (Exception, SystemExit) as error:  # not hidden: it is told with the arrays
            _log.warning("arrays could not be measured together:\n%s", user_traceback(error))
            return Company(tuple(arrays), error=_in_short(error))

    def _candidates(self, arrays: Sequence[Array]) -> list[Candidate]:
        return [candidate(array, self._store.estimate, [self._device]) for array in arrays]


def _lanes(group: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
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
