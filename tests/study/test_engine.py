"""The loop of a study against a back end that only says what a script says; no torch, no process, no waiting."""

import errno
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.core.array import FusionKey, Member
from shoal.core.cause import causes
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import (
    AlgorithmError,
    BackendError,
    DeviceError,
    ShoalError,
    StorageFullError,
    StudyFailedError,
    StudyInterrupted,
    StudyMovedError,
    TaskError,
    UnusableTaskError,
)
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.rows import Intervention, JobRow, Joined, Proposal, ReportRow, Row, TrialRow
from shoal.core.space import Space, grid, uniform
from shoal.core.trial import Decision, Report, Trial, TrialState
from shoal.host.fleet import Fleet
from shoal.journal.statistics import StudyStatistics
from shoal.journal.writer import Journal
from shoal.look.failures import first_failed
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.packing import Packing
from shoal.plan.schedule.base import JobState, JobView, Plan, Policy, Refusal
from shoal.plan.schedule.knapsack import Fifo
from shoal.results import Study
from shoal.run.base import (
    ArrayFailed,
    Backend,
    Ended,
    Event,
    Heartbeat,
    Outcome,
    Profiled,
    RelativeTimeMeasured,
    Reported,
    SignaturesFound,
)
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine
from shoal.study.retries import COMMON_FAILURES

KEY = FusionKey("mlp", "digits", 32)
PROFILE = Profile({1: 1e-3, 16: 1e-3}, 10, 1, base_memory=0, member_memory=1, compute=0.5, cores=1.0, mixing=1.0)

OF_TRIALS = [purpose for purpose in Purpose if purpose is not Purpose.ASSIST]
"""Purposes of the jobs of these studies, none of which has a helper."""

Script = Callable[[Job], Sequence[Event]]


class Killed(BaseException):
    """The process is gone at once."""


def value_of(trial: Trial, epoch: int) -> float:
    """A made-up course of training: what a trial reports is a function of it and the epoch."""
    return float(trial.config["x"]) / epoch


def reports(job: Job) -> Iterator[Reported]:
    """The events of a worker that trains all members to the end, one by one."""
    for member in job.members:
        for epoch in range(member.start + 1, member.target + 1):
            state = TrialState.PAUSED if epoch == member.target else TrialState.RUNNING
            metrics = {"loss": value_of(member.trial, epoch)}
            yield Reported(job.id, (Report(member.trial.number, epoch, metrics, 1.0, state),))


def well(job: Job) -> list[Event]:
    """A job in which nothing goes wrong."""
    match job.purpose:
        case Purpose.SIGNATURE:
            return [
                SignaturesFound(job.id, {m.trial.number: KEY for m in job.members}),
                Ended(job.id, Outcome.FINISHED),
            ]
        case Purpose.PROFILE:
            return [Profiled(job.id, job.arrays[0].key, PROFILE), Ended(job.id, Outcome.FINISHED)]
        case Purpose.TRAIN:
            return [*reports(job), Ended(job.id, Outcome.FINISHED)]


def failing(*numbers: int, outcome: Outcome = Outcome.RAISED, purpose: Purpose = Purpose.TRAIN) -> Script:
    """Jobs of that purpose that hold one of these trials end badly before they have said anything."""

    def script(job: Job) -> list[Event]:
        if job.purpose is purpose and any(member.trial.number in numbers for member in job.members):
            return [Ended(job.id, outcome, "as the script says")]
        return well(job)

    return script


def _trials(event: Reported) -> set[int]:
    return {report.trial for report in event.reports}


@dataclass
class Scripted(Backend):
    """Says of each job what the script does.

    Args:
        script: job to its events, `Ended` last.
        at_once: everything there is to say in one poll, else one event a poll.
        on_start: called with each job before it is taken.
    """

    script: Script
    at_once: bool
    on_start: Callable[[Job], None]
    started: list[Job] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    changes: list[tuple[str, JobUpdate]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events: dict[str, list[Event]] = {}
        self.polls = 0

    def start(self, job: Job, device: Device) -> None:
        self.devices[job.id] = device.name
        self.on_start(job)
        self.started.append(job)
        self._events[job.id] = list(self.script(job))

    def stop(self, job: str) -> None:
        self.stopped.append(job)
        if len(self._events[job]) != 1:  # else it is over, and only has to say so
            self._events[job] = [Ended(job, Outcome.STOPPED)]

    def kill(self, job: str) -> None:
        self.killed.append(job)
        self._events[job] = [Ended(job, Outcome.CRASHED, "was killed")]

    def release_device(self, device: str) -> None:
        self.released.append(device)

    def change(self, job: str, change: JobUpdate) -> None:
        self.changes.append((job, change))
        *before, end = self._events[job] or [None]
        if not isinstance(end, Ended):
            return  # it is over
        before = [event for event in before if not (isinstance(event, Reported) and _trials(event) & change.leave)]
        if change.find_signatures:
            before.insert(0, SignaturesFound(job, {trial.number: KEY for trial in change.find_signatures}))
        joining = Job(job, change.join) if change.join else None
        self._events[job] = [*before, *(reports(joining) if joining else ()), end]

    def poll(self, timeout: float) -> list[Event]:
        self.polls += 1
        assert self.polls < 2000, "the engine waits for something that never comes"
        said = [events.pop(0) for events in self._events.values() if events]
        while self.at_once and any(self._events.values()):
            said += [events.pop(0) for events in self._events.values() if events]
        return said

    def close(self) -> None:
        pass

    def trained(self) -> list[list[Member]]:
        return [list(job.members) for job in self.started if job.purpose is Purpose.TRAIN]


OTHER = replace(KEY, structure="another net")


def packed(script: Script, dropping: Iterable[int] = (), outcome: Outcome = Outcome.RAISED, times: int = 1) -> Script:
    """Trials of two structures in one job, of which the array of one trial fails the first few times."""
    dropped: list[int] = []

    def run(job: Job) -> list[Event]:
        numbers = [member.trial.number for member in job.members]
        if job.purpose is Purpose.SIGNATURE:
            return [
                SignaturesFound(job.id, {number: OTHER if number % 2 else KEY for number in numbers}),
                Ended(job.id, Outcome.FINISHED),
            ]
        if job.purpose is Purpose.PROFILE:
            measured = [
                Profiled(job.id, array.key, replace(PROFILE, sample_sharing="kept", fetch_seconds=9.0))
                for array in job.arrays
            ]
            return [*measured, Ended(job.id, Outcome.FINISHED)]
        mine = [array for array in job.arrays if {m.trial.number for m in array.members} & set(dropping)]
        if not mine or len(dropped) >= times:
            return script(job)
        dropped.append(1)
        trials = frozenset(member.trial.number for member in mine[0].members)
        if len(job.arrays) == 1:
            return [Ended(job.id, outcome, "as the script says")]
        rest = replace(job, arrays=tuple(array for array in job.arrays if array is not mine[0]))
        return [ArrayFailed(job.id, trials, outcome, "as the script says"), *script(rest)]

    return run


def test_arrays_of_different_structures_share_a_job(tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend(packed(well))
    stage.run(carrier)
    (job,) = [job for job in carrier.started if job.purpose is Purpose.TRAIN]
    assert [(array.key, [m.trial.number for m in array.members]) for array in job.arrays] == [
        (KEY, [0, 2]),
        (OTHER, [1, 3]),
    ]
    assert [job.purpose for job in carrier.started].count(Purpose.PROFILE) == 1, "both keys are measured by one job"
    assert [row[2] for row in stage.outcome()] == [TrialState.COMPLETE] * 4


def test_an_array_that_fails_leaves_its_job_and_its_trials_are_tried_alone(tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend(packed(well, dropping=[1]))
    stage.run(carrier)
    trained = [[m.trial.number for m in job.members] for job in carrier.started if job.purpose is Purpose.TRAIN]
    assert trained == [[0, 2, 1, 3], [1], [3]]
    assert [row[2] for row in stage.outcome()] == [TrialState.COMPLETE] * 4
    with closing(stage.open()) as journal:
        assert [row.failures for row in journal.trials()] == [0, 1, 0, 1]


def test_a_trial_whose_array_fails_again_and_again_fails_with_the_reason(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Grid(2), Space({"x": grid([1.0, 2.0])}))
    stage.run(backend(packed(well, dropping=[1], times=9)))
    assert [row[2] for row in stage.outcome()] == [TrialState.COMPLETE, TrialState.FAILED]
    with closing(stage.open()) as journal:
        assert "raised after 2 retries:\nas the script says" in journal.trials()[1].reason


def test_an_array_that_is_rejected_before_anything_was_reported_ends_the_study(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    with pytest.raises(TaskError, match="as the script says"):
        stage.run(backend(packed(well, dropping=[1], outcome=Outcome.REJECTED)))
    assert TrialState.FAILED not in {row[2] for row in stage.outcome()}


def test_what_arrays_cost_each_other_is_kept(tmp_path: Path) -> None:
    def measured(job: Job) -> list[Event]:
        return [RelativeTimeMeasured(job.id, tuple(array.key for array in job.arrays), 0.8), *well(job)]

    stage = four(tmp_path / "study")
    stage.run(backend(packed(measured)))
    assert History(tmp_path / "study" / "history.sqlite").relative_times("cpu") == {(OTHER.steps, KEY.steps): 0.8}


@dataclass(frozen=True)
class Refuse(Policy):
    """Starts nothing."""

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        waiting = [job for job in jobs if job.state is JobState.WAITING]
        return Plan(refusals=tuple(Refusal(job.id, "it is not a good day") for job in waiting))


class Stuck(Grid):
    """Forgets what it has to do."""

    def next_groups(self, free: int) -> list:  # type: ignore[type-arg]
        return []


def cluster(slots: int) -> Cluster:
    return Cluster((Node("here", slots, tuple(Device(f"cpu:{i}", "cpu", 2**30) for i in range(slots))),))


IN_SPEC = ("fuse", "hang_seconds")


@dataclass
class Stage:
    """A study in a directory, to be run by one engine after another."""

    directory: Path
    make: Callable[[], Algorithm] = lambda: Hyperband(9, brackets=1)
    space: Space = field(default_factory=lambda: Space({"x": uniform(0.0, 1.0)}))
    slots: int = 1
    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def open(self) -> Journal:
        if (self.directory / "journal.sqlite").exists():
            return Journal.open(self.directory)
        spec = StudySpec(metric="loss", mode="min", space=self.space.to_json(), **self.settings)
        return Journal.create(self.directory, spec, task=b"", algorithm=b"")

    def engine(
        self,
        journal: Journal,
        backend: Backend,
        policy: Policy | None = None,
        retries: int = 2,
        packing: Packing | None = None,
        **others: Any,
    ) -> Engine:
        algorithm = self.make()
        algorithm.bind(self.space, metric="loss", mode="min", seed=0, data_seed=0)
        history = History(self.directory / "history.sqlite")
        packer = ArrayPacker(packing)
        config = EngineConfig(Fleet(cluster(self.slots)), policy or Fifo(), history, packer)
        journal.spec = replace(journal.spec, retries=retries, **{x: others.pop(x) for x in IN_SPEC if x in others})
        return Engine(journal, algorithm, backend, replace(config, **others))

    def run(self, backend: Backend, policy: Policy | None = None, retries: int = 2) -> None:
        with closing(self.open()) as journal:
            engine = self.engine(journal, backend, policy, retries)
            engine.begin()
            try:
                engine.run()
            except StudyFailedError as failure:
                assert engine.state.lifecycle.stopped is not None
                raise first_failed(engine.state.lifecycle.stopped, journal) from failure

    def outcome(self) -> list[tuple[object, ...]]:
        with closing(self.open()) as journal:
            return [(r.number, r.config, r.state, r.epoch, dict(r.metrics), dict(r.best)) for r in journal.trials()]

    def jobs(self) -> list[tuple[str, str]]:
        with closing(self.open()) as journal:
            return [(str(job.purpose), job.outcome) for job in journal.jobs()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "study")


def four(directory: Path, slots: int = 1) -> Stage:
    """Four trials of two epochs."""
    return Stage(directory, lambda: Grid(2), Space({"x": grid([1.0, 2.0, 3.0, 4.0])}), slots)


def nothing(job: Job) -> None:
    pass


def die(job: Job) -> None:
    raise Killed


def backend(script: Script = well, at_once: bool = False, on_start: Callable[[Job], None] = nothing) -> Scripted:
    return Scripted(script, at_once, on_start)


@pytest.mark.parametrize("at_once", [False, True], ids=["event by event", "all at once"])
def test_trials_climb_from_rung_to_rung_and_go_on_where_they_stopped(stage: Stage, at_once: bool) -> None:
    carrier = backend(at_once=at_once)
    stage.run(carrier)
    assert [[(m.start, m.target) for m in job] for job in carrier.trained()] == [[(0, 1)] * 9, [(1, 3)] * 3, [(3, 9)]]
    rows = stage.outcome()
    best = min(rows, key=lambda row: row[1]["x"])  # type: ignore[index]
    assert best[2:4] == (TrialState.COMPLETE, 9)
    assert sorted(row[3] for row in rows) == [1] * 6 + [3] * 2 + [9]
    assert stage.jobs() == [("signature", "finished"), ("profile", "finished")] + [("train", "finished")] * 3


class Impatient(Grid):
    """Ends a trial as soon as another one has reported."""

    ends: int

    def observe(self, report: Report) -> list[Decision]:
        if report.trial == self.ends:
            return []
        decisions = super().observe(report)
        over = super().observe(Report(self.ends, report.epoch, state=TrialState.FAILED))
        return [*decisions, *over, Decision(self.ends, TrialState.STOPPED, "was not needed")]


def side_by_side(job: Job) -> list[Event]:
    """A job whose members train epoch by epoch, each with a report of its own."""
    if job.purpose is not Purpose.TRAIN:
        return well(job)
    said = list(reports(job))
    return [*sorted(said, key=lambda event: event.reports[0].epoch), Ended(job.id, Outcome.FINISHED)]


def test_a_trial_that_is_ended_while_it_runs_leaves_its_job(tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend(side_by_side)

    def impatient() -> Algorithm:
        algorithm = Impatient(2)
        algorithm.ends = 3
        return algorithm

    stage.make = impatient
    stage.run(carrier)
    assert carrier.changes == [("job-00003", JobUpdate(leave=frozenset({3})))]
    assert [row[2:4] for row in stage.outcome()] == [(TrialState.COMPLETE, 2)] * 3 + [(TrialState.STOPPED, 0)]


def lacking(*numbers: int, epoch: int) -> Script:
    """Jobs in which some trials do not report the metric at an epoch."""

    def script(job: Job) -> list[Event]:
        events = side_by_side(job)
        for place, event in enumerate(events):
            if isinstance(event, Reported) and _trials(event) & set(numbers) and event.reports[0].epoch == epoch:
                events[place] = Reported(job.id, (replace(event.reports[0], metrics={"other": 1.0}),))
        return events

    return script


def test_a_metric_that_nobody_reports_ends_the_study_and_is_not_recorded(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    with pytest.raises(TaskError, match="metric 'loss' is not reported by the task; it reports 'other'"):
        stage.run(backend(lacking(0, 1, 2, 3, epoch=1)))
    assert {(row[2], row[3]) for row in stage.outcome()} == {(TrialState.PENDING, 0)}
    stage.run(backend())  # a resume with a task that does report it
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def test_a_loss_that_the_first_report_lacks_ends_the_study(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", settings={"loss": "trian_loss"})
    with pytest.raises(TaskError, match=r"loss 'trian_loss' is not reported by the task; it reports 'loss'.*as loss="):
        stage.run(backend())
    assert {(row[2], row[3]) for row in stage.outcome()} == {(TrialState.PENDING, 0)}


def test_an_epoch_without_the_metric_that_decides_is_not_the_best(tmp_path: Path) -> None:
    def first_only(job: Job) -> list[Event]:
        return [
            Reported(job.id, tuple(replace(each, metrics={**each.metrics, "f1": 0.5}) for each in event.reports))
            if isinstance(event, Reported) and event.reports[0].epoch == 1
            else event
            for event in side_by_side(job)
        ]

    stage = replace(four(tmp_path / "study"), settings={"best_by": {"f1": "max"}})
    with pytest.raises(TaskError, match="best_by 'f1' is not reported by the task; it reports 'loss'"):
        stage.run(backend())
    stage.run(backend(first_only))
    with closing(stage.open()) as journal:
        assert [(row.state, row.epoch, row.best_epoch) for row in journal.trials()] == [(TrialState.COMPLETE, 2, 1)] * 4


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_metric_that_one_trial_lacks_fails_that_trial(epoch: int, tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend(lacking(2, epoch=epoch))
    stage.run(carrier)
    states = [row[2] for row in stage.outcome()]
    assert states == [TrialState.COMPLETE] * 2 + [TrialState.FAILED, TrialState.COMPLETE]
    with closing(stage.open()) as journal:
        reason = journal.trials()[2].reason
    assert reason == f"metric 'loss' is missing at epoch {epoch}; the trial reports 'other'"
    told = ("job-00003", JobUpdate(leave=frozenset({2}))) in carrier.changes
    assert told is (epoch == 1)  # at its budget a trial has left by itself


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({3: 1.0}, "a metric is named 3; names must be strings, such as '3'"),
        ({("a", "b"): 1.0}, "a metric is named ('a', 'b'); names must be strings"),
        ({"other": "low"}, "the metric 'other' must be a number, got 'low'"),
        ({"other": None}, "the metric 'other' must be a number, got None"),
        ({"other": True}, "the metric 'other' must be a number, got True"),
        ({"other": [1.0]}, "the metric 'other' must be a number, got [1.0]"),
        ({"other": 10**400}, "the metric 'other' is an integer too large for a float"),
    ],
    ids=repr,
)
def test_what_is_not_a_metric_fails_its_trial_and_is_not_recorded(
    found: dict[object, object], fault: str, tmp_path: Path
) -> None:
    def script(job: Job) -> list[Event]:
        events = side_by_side(job)
        for place, event in enumerate(events):
            if isinstance(event, Reported) and _trials(event) == {2}:
                metrics = {**event.reports[0].metrics, **found}
                events[place] = Reported(job.id, (replace(event.reports[0], metrics=metrics),))  # type: ignore[arg-type]
        return events

    stage, carrier = four(tmp_path / "study"), backend(script)
    stage.run(carrier)
    assert [row[2] for row in stage.outcome()] == [TrialState.COMPLETE] * 2 + [TrialState.FAILED, TrialState.COMPLETE]
    stage.run(backend())  # it can be gone on with
    with closing(stage.open()) as journal:
        row = journal.trials()[2]
    assert row.reason.startswith(f"at epoch 1 {fault}")
    assert list(row.metrics) == ["loss"]
    assert ("job-00003", JobUpdate(leave=frozenset({2}))) in carrier.changes


def brackets(directory: Path) -> Stage:
    """Three brackets, of which two begin anew while the others still run."""
    return Stage(directory, lambda: Hyperband(9))


def test_who_goes_on_joins_a_job_that_runs(tmp_path: Path) -> None:
    stage, carrier = brackets(tmp_path / "study"), backend(side_by_side)
    stage.run(carrier)
    joins = [
        [(m.trial.number, m.start, m.target) for array in change.join for m in array.members]
        for _, change in carrier.changes
    ]
    assert {job for job, _ in carrier.changes} == {"job-00003"}
    assert len(carrier.trained()) == 1, "one job was all it took"
    assert len([member for join in joins for member in join]) == 3 + 1 + 1
    assert all(start in (1, 3) for join in joins for _, start, _ in join)
    with closing(stage.open()) as journal:
        (job,) = [job for job in journal.jobs() if job.purpose is Purpose.TRAIN]
        assert sorted(job.trials) == [row.number for row in journal.trials()]


def test_nobody_joins_a_trial_that_failed_in_company(tmp_path: Path) -> None:
    """The first job crashes: each of its members is trained alone once."""
    stage = brackets(tmp_path / "study")
    first: list[str] = []

    def crashes_once(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN and not first:
            first.append(job.id)
            return [Ended(job.id, Outcome.CRASHED, "as the script says")]
        return side_by_side(job)

    carrier = backend(crashes_once)
    stage.run(carrier)
    alone = {job.id for job in carrier.started if job.purpose is Purpose.TRAIN and job.members[0].start == 0}
    assert len(alone) == 1 + 17
    assert not {job for job, change in carrier.changes if change.join} & alone
    assert all(row[2].final for row in stage.outcome())


def test_a_device_that_is_idle_waits_for_no_look_at_a_busy_one(tmp_path: Path) -> None:
    """Looks are never answered; the second device is free in the end."""

    class Busy(Scripted):
        def change(self, job: str, change: JobUpdate) -> None:
            if not change.find_signatures:
                super().change(job, change)

    stage = Stage(tmp_path / "study", lambda: ASHA(9, max_epochs=9, concurrency=4), slots=2)
    carrier = Busy(side_by_side, at_once=False, on_start=nothing)
    stage.run(carrier)
    assert all(row[2].final for row in stage.outcome())


class Deaf(Scripted):
    """Jobs that are over when they would hear of a change."""

    def change(self, job: str, change: JobUpdate) -> None:
        self.changes.append((job, change))


def test_who_came_too_late_to_join_waits_again(tmp_path: Path) -> None:
    stage, carrier = brackets(tmp_path / "study"), Deaf(side_by_side, at_once=False, on_start=nothing)
    stage.run(carrier)
    assert len(carrier.changes) >= 3
    undisturbed = brackets(tmp_path / "undisturbed")
    undisturbed.run(backend())
    assert stage.outcome() == undisturbed.outcome()
    assert all(row[2].final for row in stage.outcome())


class Rigid(Scripted):
    """Cannot change jobs."""

    elastic = False

    def change(self, job: str, change: JobUpdate) -> None:
        raise AssertionError("it was asked to")


def test_a_back_end_that_cannot_change_jobs_is_not_asked_to(tmp_path: Path) -> None:
    stage, carrier = brackets(tmp_path / "study"), Rigid(side_by_side, at_once=False, on_start=nothing)
    stage.run(carrier)
    arrays = [array for job in carrier.started if job.purpose is Purpose.TRAIN for array in job.arrays]
    assert all(len({member.start for member in array.members}) == 1 for array in arrays)
    assert {member.start for array in arrays for member in array.members} == {0, 1, 3}


def test_new_trials_are_looked_at_by_jobs_that_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: ASHA(9, max_epochs=9, concurrency=4))
    carrier = backend(side_by_side)
    stage.run(carrier)
    looked = [trial.number for _, change in carrier.changes for trial in change.find_signatures]
    in_jobs = [m.trial.number for job in carrier.started if job.purpose is Purpose.SIGNATURE for m in job.members]
    assert looked
    assert sorted(looked + in_jobs) == list(range(9))


def test_who_was_not_looked_at_when_a_job_crashed_is_a_suspect(tmp_path: Path) -> None:
    """One of these trials may have brought the process down: they are looked at one by one."""
    stage = Stage(tmp_path / "study", lambda: ASHA(9, max_epochs=9, concurrency=4))

    class Fragile(Scripted):
        def change(self, job: str, change: JobUpdate) -> None:
            if change.find_signatures:
                self.changes.append((job, change))
                self._events[job] = [Ended(job, Outcome.CRASHED, "as the script says")]
            else:
                super().change(job, change)

    carrier = Fragile(side_by_side, at_once=False, on_start=nothing)
    stage.run(carrier)
    looked = {trial.number for _, change in carrier.changes for trial in change.find_signatures}
    alone = [[m.trial.number for m in job.members] for job in carrier.started if job.purpose is Purpose.SIGNATURE]
    assert all([number] in alone for number in looked)
    assert all(row[2].final for row in stage.outcome())


def test_a_job_is_in_the_journal_before_it_starts(stage: Stage) -> None:
    seen: list[Purpose] = []

    def look(job: Job) -> None:
        (row,) = [row for row in journal.jobs() if row.id == job.id]
        assert (row.ended, row.device, row.trials) == (None, "cpu:0", tuple(m.trial.number for m in job.members))
        states = {row.state for row in journal.trials() if row.number in row_numbers(job)}
        assert states == {TrialState.RUNNING if job.purpose is Purpose.TRAIN else TrialState.PENDING}
        seen.append(job.purpose)

    with closing(stage.open()) as journal:
        engine = stage.engine(journal, backend(on_start=look))
        engine.begin()
        engine.run()
    assert seen == [Purpose.SIGNATURE, Purpose.PROFILE, Purpose.TRAIN, Purpose.TRAIN, Purpose.TRAIN]


def row_numbers(job: Job) -> set[int]:
    return {member.trial.number for member in job.members}


def full_if(full: Callable[[Sequence[Row]], bool]) -> Callable[[Journal, Sequence[Row]], None]:
    """`Journal.write`, for which the disk is full when it gets some rows."""
    write = Journal.write

    def writing(journal: Journal, rows: Sequence[Row]) -> None:
        if rows and full(rows):
            raise StorageFullError("no room for the journal")
        write(journal, rows)

    return writing


def run_with_kills(kind: type[Row], when: str, run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run engines of which each dies as it writes a row of a kind, each time one more than the one before it.

    Args:
        kind: of the row.
        when: `before` or `after` the step of the row is written.
        run: runs one engine.
        monkeypatch: of the test.

    Returns:
        How many died before one got to the end.
    """
    write = Journal.write
    for kills in range(100):
        left = kills % 7

        def mortal(journal: Journal, rows: Sequence[Row]) -> None:
            nonlocal left
            left -= any(isinstance(row, kind) for row in rows)
            if left < 0 and when == "before":
                raise Killed
            write(journal, rows)
            if left < 0:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "write", mortal)
            try:
                run()
            except Killed:
                continue
            return kills
    raise AssertionError("no engine got to the end")


def walk_with_kills(seed: int, run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run engines of which each dies at random before or after a step is written, until one gets to the end.

    Args:
        seed: of the walk.
        run: runs one engine.
        monkeypatch: of the test.

    Returns:
        How many died.
    """
    random, write = Random(seed), Journal.write
    for kills in range(200):
        left, before = random.randrange(12), random.random() < 0.5

        def mortal(journal: Journal, rows: Sequence[Row]) -> None:
            nonlocal left
            left -= bool(rows)
            if left < 0 and before:  # noqa: B023  (each engine has its own)
                raise Killed
            write(journal, rows)
            if left < 0:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "write", mortal)
            try:
                run()
            except Killed:
                continue
            return kills
    raise AssertionError("no engine got to the end")


MAKERS: dict[str, Callable[[], Algorithm]] = {
    "hyperband": lambda: Hyperband(9, brackets=1),
    "asha": lambda: ASHA(9, max_epochs=9, concurrency=4),
    "asha, stopping": lambda: ASHA(9, max_epochs=9, concurrency=4, variant="stopping"),
    "brackets": lambda: Hyperband(9),
    "median": lambda: Median(8, 4, concurrency=3, least=2),
    "optuna": lambda: OptunaSearch(8, 3, concurrency=3),
}


@pytest.mark.parametrize("make", [MAKERS["brackets"], MAKERS["asha"]], ids=["brackets", "asha"])
def test_kills_at_random_change_nothing(
    make: Callable[[], Algorithm], turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, stage = Stage(tmp_path / "undisturbed", make), Stage(tmp_path / "study", make)
    undisturbed.run(backend())
    assert walk_with_kills(turn, lambda: stage.run(backend()), monkeypatch)
    assert stage.outcome() == undisturbed.outcome()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Proposal, ReportRow, TrialRow, JobRow, Joined])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_kill_around_any_row_changes_nothing(
    make: Callable[[], Algorithm], kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = Stage(tmp_path / "undisturbed", make)
    undisturbed.run(backend())
    stage = Stage(tmp_path / "study", make)
    kills = run_with_kills(kind, when, lambda: stage.run(backend()), monkeypatch)
    assert kills > 0 or (kind is Joined and make is MAKERS["hyperband"]), "one bracket: nobody runs to be joined"
    assert stage.outcome() == undisturbed.outcome()


def test_a_kill_between_the_record_and_the_start_of_a_job_loses_no_trial(tmp_path: Path) -> None:
    undisturbed = Stage(tmp_path / "undisturbed")
    undisturbed.run(backend())
    stage = Stage(tmp_path / "study")
    killed: set[Purpose] = set()

    def die_once(job: Job) -> None:
        if job.purpose not in killed:
            killed.add(job.purpose)
            raise Killed

    for _ in OF_TRIALS:
        with pytest.raises(Killed):
            stage.run(backend(on_start=die_once))
    stage.run(backend(on_start=die_once))
    assert stage.outcome() == undisturbed.outcome()
    assert [outcome for _, outcome in stage.jobs()].count("orphaned") == len(OF_TRIALS)


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_who_fails_in_company_gets_its_tries_alone(retries: int, tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend(failing(2))
    stage.run(carrier, retries=retries)
    jobs = [[member.trial.number for member in job] for job in carrier.trained()]
    assert jobs[0] == [0, 1, 2, 3]
    assert sorted(jobs[1:]) == [[0], [1]] + [[2]] * max(1, retries) + [[3]]
    assert [row[2] for row in stage.outcome()] == [TrialState.COMPLETE] * 2 + [TrialState.FAILED, TrialState.COMPLETE]
    with closing(stage.open()) as journal:
        row = journal.trials()[2]
        assert (row.failures, row.epoch) == (max(1, retries) + 1, 0)
        assert row.reason == f"raised after {'1 retry' if retries < 2 else '2 retries'}:\nas the script says"


def test_a_trial_that_was_well_alone_is_in_company_again_when_promoted(stage: Stage) -> None:
    first = True

    def fails_once(job: Job) -> Sequence[Event]:
        nonlocal first
        if job.purpose is Purpose.TRAIN and first:
            first = False
            return [Ended(job.id, Outcome.CRASHED, "once")]
        return well(job)

    carrier = backend(fails_once)
    stage.run(carrier)
    assert [len(job) for job in carrier.trained()] == [9] + [1] * 9 + [3, 1]


def test_a_key_that_cannot_be_measured_is_not_measured_again_and_not_fused(tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend(failing(0, purpose=Purpose.PROFILE))
    stage.run(carrier)
    assert [purpose for purpose, _ in stage.jobs()].count("profile") == 1
    assert [len(job) for job in carrier.trained()] == [1] * 4
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


ALL = range(COMMON_FAILURES)


def twelve(directory: Path) -> Stage:
    """Twelve trials of two epochs."""
    return Stage(directory, lambda: Grid(2), Space({"x": grid([float(n) for n in range(12)])}))


def test_first_trials_that_fail_alike_end_a_study_and_others_come_first_when_it_goes_on(tmp_path: Path) -> None:
    """As in a grid whose first values are at fault: it gets through by being resumed."""
    stage, carrier = twelve(tmp_path / "study"), backend(failing(*range(8)))
    with pytest.raises(StudyFailedError, match="5 trials failed alike"):
        stage.run(carrier)
    assert [[member.trial.number for member in job] for job in carrier.trained()] == [[*range(12)], *([n] for n in ALL)]
    assert {row[2] for row in stage.outcome()} == {TrialState.PENDING}
    again = backend(failing(*range(8)))
    stage.run(again)
    first, *alone = [[member.trial.number for member in job] for job in again.trained()]
    assert sorted(first) == [*range(12)]
    assert alone[:4] == [[5], [6], [7], [8]]
    assert [row[2] for row in stage.outcome()] == [TrialState.FAILED] * 8 + [TrialState.COMPLETE] * 4


def test_trials_of_one_job_that_fail_one_by_one_end_a_study_as_soon(tmp_path: Path) -> None:
    dropped = []

    def script(job: Job) -> Sequence[Event]:
        if job.purpose is not Purpose.TRAIN:
            return well(job)
        dropped.append(len(job.members))
        each = [ArrayFailed(job.id, frozenset({m.trial.number}), Outcome.RAISED, "ValueError: x") for m in job.members]
        return [*each, Ended(job.id, Outcome.FINISHED)]

    stage = twelve(tmp_path / "study")
    with pytest.raises(StudyFailedError, match=r"ValueError: x \(trials 0-4\)"):
        stage.run(backend(script))
    assert dropped == [12]


def test_profiles_that_raise_alike_end_a_study_as_soon(tmp_path: Path) -> None:
    def script(job: Job) -> Sequence[Event]:
        if job.purpose is Purpose.SIGNATURE:
            keys = {m.trial.number: replace(KEY, structure=f"net {m.trial.number}") for m in job.members}
            return [SignaturesFound(job.id, keys), Ended(job.id, Outcome.FINISHED)]
        return [Ended(job.id, Outcome.RAISED, "Traceback\nValueError: x\nLog: a.log")]

    stage = twelve(tmp_path / "study")
    with pytest.raises(StudyFailedError, match=r"ValueError: x \(trials 0-4; log: a.log\)"):
        stage.run(backend(script))
    assert [purpose for purpose, _ in stage.jobs()] == ["signature", *["profile"] * COMMON_FAILURES]
    with closing(stage.open()) as journal:
        assert [(cause.text, cause.trials) for cause in causes(StudyStatistics(journal).unmeasured(0.0))] == [
            ("ValueError: x", (*ALL,))
        ]


def test_profiles_of_trials_that_ended_a_run_do_not_end_the_next(tmp_path: Path) -> None:
    """They come before any training."""

    def script(job: Job) -> Sequence[Event]:
        if job.purpose is Purpose.SIGNATURE:
            keys = {m.trial.number: replace(KEY, structure=f"net {m.trial.number}") for m in job.members}
            return [SignaturesFound(job.id, keys), Ended(job.id, Outcome.FINISHED)]
        return [Ended(job.id, Outcome.RAISED, "ValueError: x")] if job.members[0].trial.number < 8 else well(job)

    stage = twelve(tmp_path / "study")
    with pytest.raises(StudyFailedError):
        stage.run(backend(script))
    stage.run(backend(script))
    assert [row[2] for row in stage.outcome()] == [TrialState.FAILED] * 8 + [TrialState.COMPLETE] * 4


def test_once_a_trial_has_reported_all_may_fail_alike_after_a_resume_too(tmp_path: Path) -> None:
    def one_reports(job: Job) -> Sequence[Event]:
        if job.purpose is not Purpose.TRAIN:
            return well(job)
        return [next(reports(job)), Ended(job.id, Outcome.CRASHED, "another cause")]

    def die_alone(job: Job) -> None:
        if len(job.members) == 1:
            raise Killed

    stage = twelve(tmp_path / "study")
    with pytest.raises(Killed):
        stage.run(backend(one_reports, on_start=die_alone))
    stage.run(backend(failing(*range(12))))
    assert {row[2] for row in stage.outcome()} == {TrialState.FAILED}


def test_after_a_signature_job_that_crashed_trials_are_looked_at_one_by_one(tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend(failing(0, outcome=Outcome.CRASHED, purpose=Purpose.SIGNATURE))
    stage.run(carrier)
    assert [purpose for purpose, _ in stage.jobs()][:5] == ["signature"] * 5
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def test_what_a_policy_refuses_for_good_stops_the_study_with_its_reason(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    with pytest.raises(DeviceError, match=r"4 trials can never start: it is not a good day\..*shoal resume"):
        stage.run(backend(), Refuse())
    with closing(stage.open()) as journal:
        assert [(row.state, row.reason) for row in journal.trials()] == [
            (TrialState.PENDING, "it is not a good day")
        ] * 4


def test_an_algorithm_that_neither_proposes_nor_ends_is_a_fault(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Stuck(2), Space({"x": grid([1.0])}))
    with pytest.raises(AlgorithmError, match="neither proposes trials nor has finished"):
        stage.run(backend())


def test_an_interrupt_stops_the_jobs_and_keeps_the_trials(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    carrier = backend(lambda job: (engine.interrupt() if job.purpose is Purpose.TRAIN else None) or well(job))
    with closing(stage.open()) as journal:
        engine = stage.engine(journal, carrier)
        engine.begin()
        with pytest.raises(StudyInterrupted, match=r"everything is saved\. Resume with: shoal resume"):
            engine.run()
        assert {row.state for row in journal.trials()} == {TrialState.PENDING}
        assert {row.failures for row in journal.trials()} == {0}
    assert carrier.stopped == [carrier.started[-1].id]
    assert stage.jobs()[-1] == ("train", "stopped")
    stage.run(backend())
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def moved_away(study: Path) -> None:
    study.rename(study.with_name("moved"))


def moved_and_made_again(study: Path) -> None:
    moved_away(study)
    study.mkdir()


def removed(study: Path) -> None:
    shutil.rmtree(study)


def journal_replaced(study: Path) -> None:
    shutil.copy(study / "journal.sqlite", study / "copy")
    (study / "copy").replace(study / "journal.sqlite")


@pytest.mark.parametrize(
    ("goes", "words"),
    [
        (
            moved_away,
            r"was moved to .*/moved while it ran\. All until then is recorded; resume it with: shoal resume .*",
        ),
        (moved_and_made_again, "was moved to .*/moved while it ran"),
        (removed, "was removed while it ran, and its records with it"),
        (journal_replaced, "has no journal any more: journal.sqlite was removed or replaced while it ran"),
    ],
)
def test_a_study_whose_directory_goes_away_ends_and_records_nothing_wrong(
    goes: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    def script(job: Job) -> list[Event]:
        if job.purpose is not Purpose.TRAIN:
            return well(job)
        goes(tmp_path / "study")
        return [Ended(job.id, Outcome.RAISED, "there is no such directory")]

    stage, carrier = four(tmp_path / "study", slots=2), backend(script)
    with pytest.raises(StudyMovedError, match=rf"the directory of the study, {tmp_path}/study, {words}"):
        stage.run(carrier)
    assert not carrier.stopped, "nothing could be saved"
    assert not (tmp_path / "study" / "checkpoints").exists()
    if (tmp_path / "moved").exists():
        again = four(tmp_path / "moved")
        with closing(again.open()) as journal:
            assert {row.failures for row in journal.trials()} == {0}
        again.run(backend())
        assert {row[2] for row in again.outcome()} == {TrialState.COMPLETE}


@pytest.mark.parametrize(
    ("outcome", "error"), [(Outcome.REJECTED, TaskError), (Outcome.STORAGE_FULL, StorageFullError)]
)
@pytest.mark.parametrize("purpose", OF_TRIALS)
def test_what_every_job_would_have_too_ends_the_study_whoever_says_it(
    outcome: Outcome, error: type[ShoalError], purpose: Purpose, tmp_path: Path
) -> None:
    """Both devices say it in one poll."""
    stage = four(tmp_path / "study", slots=2)
    with pytest.raises(error, match="as the script says"):
        stage.run(backend(failing(*range(4), outcome=outcome, purpose=purpose), at_once=True))
    assert {row[2] for row in stage.outcome()} == {TrialState.PENDING}
    stage.run(backend())
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def test_a_back_end_that_cannot_start_a_job_ends_the_study_and_not_the_others(tmp_path: Path) -> None:
    stage = four(tmp_path / "study", slots=2)
    taken: list[str] = []

    def one_only(job: Job) -> None:
        if taken:
            raise BackendError("no more processes")
        taken.append(job.id)

    carrier = backend(on_start=one_only)
    with pytest.raises(BackendError, match="no more processes"):
        stage.run(carrier)
    assert carrier.stopped == taken
    stage.run(backend())
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def test_jobs_that_cannot_be_started_on_a_full_disk_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both signature jobs are to start when the first cannot, and that cannot be recorded."""

    def none(job: Job) -> None:
        raise BackendError("no more processes")

    def ends(rows: Sequence[Row]) -> bool:
        return any(isinstance(row, JobRow) and row.ended is not None for row in rows)

    stage, carrier = four(tmp_path / "study", slots=2), backend(on_start=none)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full_if(ends))
        with pytest.raises(StorageFullError, match="no room for the journal"):
            stage.run(carrier)
    assert not carrier.stopped, "no job was there"
    stage.run(backend())
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


@pytest.mark.parametrize(
    ("outcome", "trials"),
    [(Outcome.RAISED, 1), (Outcome.STOPPED, 2)],
    ids=["it cannot be", "not for the sake of trials that failed in company"],
)
def test_who_runs_out_of_memory_does_not_wait_for_a_kind_of_device_on_which_nothing_is_measured(
    outcome: Outcome, trials: int, tmp_path: Path
) -> None:
    devices = (Device("small:0", "small", 2**30), Device("large:0", "large", 2**31))
    stage = Stage(tmp_path / "study", lambda: Grid(1), Space({"x": grid([1.0, 2.0][:trials])}))
    short: list[str] = []

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.PROFILE and carrier.devices[job.id] == "large:0":
            return [Ended(job.id, outcome, "as the script says")]
        if job.purpose is Purpose.TRAIN and len(job.members) > 1:
            return [Ended(job.id, Outcome.CRASHED, "as the script says")]
        if job.purpose is Purpose.TRAIN and not short:
            short.append(job.id)
            return [Ended(job.id, Outcome.OUT_OF_MEMORY, "as the script says")]
        return well(job)

    carrier = backend(script)
    with closing(stage.open()) as journal:
        engine = stage.engine(journal, carrier, fleet=Fleet(Cluster((Node("here", 2, devices),))))
        engine.begin()
        engine.run()
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}
    assert short


def test_who_was_to_have_a_larger_device_fails_when_that_turns_out_to_be_of_no_use(tmp_path: Path) -> None:
    devices = (Device("small:0", "small", 2**30), Device("large:0", "large", 2**31))
    stage = Stage(tmp_path / "study", lambda: Grid(1), Space({"x": grid([1.0, 2.0])}))

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.PROFILE and carrier.devices[job.id] == "large:0":  # after the trials have run
            return [*[Heartbeat(job.id, True)] * 20, Ended(job.id, Outcome.RAISED, "as the script says")]
        if job.purpose is Purpose.TRAIN and any(member.trial.number == 1 for member in job.members):
            return [Ended(job.id, Outcome.OUT_OF_MEMORY, "as the script says")]
        return well(job)

    carrier = backend(script)
    with closing(stage.open()) as journal:
        engine = stage.engine(journal, carrier, fleet=Fleet(Cluster((Node("here", 2, devices),))), fuse=False)
        engine.begin()
        engine.run()
        states = {trial.number: (trial.state, trial.reason) for trial in journal.trials()}
    assert states[0][0] is TrialState.COMPLETE
    assert states[1][0] is TrialState.FAILED
    assert "no device that may run it has more memory" in states[1][1]


def test_a_job_whose_start_cannot_be_recorded_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, carrier = four(tmp_path / "study", slots=2), backend()

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full_if(lambda rows: any(isinstance(row, JobRow) for row in rows)))
        with pytest.raises(StorageFullError, match="no room for the journal"):
            stage.run(carrier)
    assert not carrier.started
    assert stage.jobs() == []
    stage.run(backend())
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def test_a_full_disk_as_a_trial_gets_a_copy_ends_the_study_in_words(tmp_path: Path) -> None:
    stage, copied = Stage(tmp_path / "study", lambda: PBT(4, epochs=4)), set[int]()

    def copying(fails: bool) -> Backend:
        def copy_checkpoint(directory: Path, trial: Trial) -> None:
            copied.add(trial.number)
            if fails and trial.origin is not None and trial.origin.epoch == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

        carrier = backend()
        carrier.copy_checkpoint = copy_checkpoint  # type: ignore[method-assign]
        return carrier

    with pytest.raises(StorageFullError, match="No space left on device"):
        stage.run(copying(fails=True))
    assert copied == {4, 5}, "those with an origin"
    stage.run(copying(fails=False))
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE, TrialState.STOPPED}


def test_the_study_ends_when_its_jobs_have_and_hears_their_last_words(tmp_path: Path) -> None:
    better = replace(PROFILE, fused_gain={4: 3.0}, compiled_gain={4: 2.0}, compile_seconds=5.0)

    def with_finding(job: Job) -> Sequence[Event]:
        *said, ended = well(job)
        return (
            [*said, Profiled(job.id, job.arrays[0].key, better), ended]
            if job.purpose is Purpose.TRAIN
            else [*said, ended]
        )

    stage = four(tmp_path / "study")
    carrier = backend(with_finding)
    carrier.stop = lambda job: carrier.stopped.append(job)  # type: ignore[method-assign]
    stage.run(carrier)
    assert stage.jobs()[-1] == ("train", "finished")
    history = History(stage.directory / "history.sqlite")
    assert history.get(KEY.structure, KEY.data, KEY.batch_size, "cpu") == better


def test_what_was_measured_trains_where_it_was_measured_though_other_devices_were_idle(tmp_path: Path) -> None:
    """The end of a profile job comes after its profile; its process has built the trials."""
    stage, carrier = four(tmp_path / "study", slots=2), backend()
    stage.run(carrier)
    profiled = [carrier.devices[job.id] for job in carrier.started if job.purpose is Purpose.PROFILE]
    trained = [carrier.devices[job.id] for job in carrier.started if job.purpose is Purpose.TRAIN]
    assert profiled == trained[:1]


def test_a_trial_that_fails_by_itself_leaves_its_company_alone(tmp_path: Path) -> None:
    def one_is_nan(job: Job) -> Sequence[Event]:
        said = list(well(job))
        if job.purpose is Purpose.TRAIN:
            failed = Report(1, 1, {"loss": float("nan")}, 1.0, TrialState.FAILED, "loss is not finite at step 3")
            said = [e for e in said if not (isinstance(e, Reported) and e.reports[0].trial == 1)]
            said.insert(0, Reported(job.id, (failed,)))
        return said

    stage, carrier = four(tmp_path / "study"), backend(one_is_nan)
    stage.run(carrier)
    assert len(carrier.trained()) == 1
    assert [str(row[2]) for row in stage.outcome()] == ["complete", "failed", "complete", "complete"]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_signature_jobs_are_shared_by_idle_devices(slots: int, tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study", slots), backend()
    stage.run(carrier)
    signature_jobs = [job for job in carrier.started if job.purpose is Purpose.SIGNATURE]
    assert len(signature_jobs) == slots
    assert sorted(number for job in signature_jobs for number in row_numbers(job)) == [0, 1, 2, 3]


def test_an_engine_that_proposes_other_trials_than_were_recorded_says_so(stage: Stage) -> None:
    with pytest.raises(Killed):
        stage.run(backend(on_start=die))
    other = Stage(stage.directory, lambda: Hyperband(27))
    with pytest.raises(ShoalError, match="proposes other trials than before"):
        other.run(backend())


@pytest.mark.parametrize("purpose", [Purpose.SIGNATURE, Purpose.TRAIN])
def test_a_task_that_cannot_be_loaded_after_a_resume_fails_no_trial(purpose: Purpose, stage: Stage) -> None:
    def die_in_the_second_rung(job: Job) -> None:
        if job.purpose is Purpose.TRAIN and job.members[0].start > 0:
            raise Killed

    with pytest.raises(Killed):
        stage.run(backend(on_start=die_in_the_second_rung))
    with pytest.raises(UnusableTaskError, match="as the script says"):
        stage.run(backend(failing(*range(9), outcome=Outcome.UNUSABLE, purpose=purpose)))
    assert TrialState.FAILED not in {row[2] for row in stage.outcome()}
    stage.run(backend())
    assert TrialState.COMPLETE in {row[2] for row in stage.outcome()}


def test_a_policy_is_shown_the_oversubscription_of_the_fleet(stage: Stage) -> None:
    seen: set[float] = set()

    class Look(Fifo):
        def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
            seen.update(device.capacity for _, device in cluster)
            return super().plan(jobs, cluster, now)

    with closing(stage.open()) as journal:
        engine = stage.engine(journal, backend(), Look(), fleet=Fleet(cluster(1), oversubscription=2.5))
        engine.begin()
        engine.run()
    assert seen == {2.5}


def unsteady(*numbers: int, epoch: int = 1) -> Script:
    """These trials fail in that epoch, whose loss is not a number."""

    def script(job: Job) -> list[Event]:
        events: list[Event] = []
        for event in well(job):
            if isinstance(event, Reported) and event.reports[0].trial in numbers:
                (report,) = event.reports
                if report.epoch > epoch:
                    continue
                if report.epoch == epoch:
                    failed = {"metrics": {"loss": math.nan}, "state": TrialState.FAILED, "reason": "as the script says"}
                    event = Reported(job.id, (replace(report, **failed),))
            events.append(event)
        return events

    return script


def retry(stage: Stage, *numbers: int) -> list[int]:
    return Study(stage.directory).retry(numbers or None)


RETRIED = {name: MAKERS[name] for name in ("hyperband", "asha", "median", "optuna")} | {"grid": lambda: Grid(3)}


@pytest.mark.parametrize("make", RETRIED.values(), ids=RETRIED)
def test_a_trial_that_failed_is_tried_again_and_its_algorithm_goes_on_without_it(
    make: Callable[[], Algorithm], tmp_path: Path
) -> None:
    space = Space({"x": grid([1.0, 2.0, 3.0, 4.0])}) if make is RETRIED["grid"] else Space({"x": uniform(0.0, 1.0)})
    stage = Stage(tmp_path / "study", make, space)
    stage.run(backend(unsteady(0, 3)))
    without = stage.outcome()
    failed = [row for row in without if row[2] is TrialState.FAILED]
    assert failed
    assert retry(stage) == [row[0] for row in failed]
    carrier = backend()
    stage.run(carrier)
    again = stage.outcome()
    assert [row for row in again if row[0] not in (0, 3)] == [row for row in without if row[0] not in (0, 3)]
    assert {member.trial.number for job in carrier.trained() for member in job} == {row[0] for row in failed}
    with closing(stage.open()) as journal:
        for row in journal.trials():
            if row.number in {before[0] for before in failed}:
                assert (row.state, row.epoch, row.failures) == (TrialState.COMPLETE, row.target, 0)
                assert row.objective == value_of(row.trial, row.target)
                assert "was retried" in row.reason
    assert not list((stage.directory / "requests").iterdir())
    stage.run(backend())  # a replay proposes what was proposed
    assert stage.outcome() == again


def test_a_trial_that_is_tried_again_may_fail_again_and_be_tried_again(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    stage.run(backend(unsteady(1)))
    for script in (unsteady(1), failing(1), unsteady(1, epoch=2)):
        retry(stage, 1)
        stage.run(backend(script))
        assert [row[2] for row in stage.outcome()].count(TrialState.FAILED) == 1
        with closing(stage.open()) as journal:
            assert "as the script says" in journal.trials()[1].reason
    retry(stage, 1)
    retry(stage, 1)  # asking twice is asking once
    stage.run(backend())
    assert [row[2] for row in stage.outcome()] == [TrialState.COMPLETE] * 4


def test_a_study_that_runs_tries_again_at_once(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    asked: list[int] = []

    class Watched(Scripted):
        def poll(self, timeout: float) -> list[Event]:
            if not asked and TrialState.FAILED in {row.state for row in Study(stage.directory).trials}:
                asked.extend(retry(stage))
            return super().poll(timeout)

    fails = iter([unsteady(0)] * 3)  # signature, profile, and the first training
    stage.run(Watched(lambda job: next(fails, well)(job), at_once=False, on_start=nothing))
    assert asked == [0]
    assert [row[2] for row in stage.outcome()] == [TrialState.COMPLETE] * 4


def test_kills_at_random_while_trials_are_tried_again_change_nothing(
    turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [Stage(tmp_path / name, MAKERS["hyperband"]) for name in ("undisturbed", "study")]
    for stage in stages:
        stage.run(backend(unsteady(0, 3)))
        retry(stage)
    stages[0].run(backend())
    assert walk_with_kills(turn, lambda: stages[1].run(backend()), monkeypatch)
    assert stages[1].outcome() == stages[0].outcome()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Intervention, ReportRow, TrialRow, JobRow])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_trials_are_tried_again_changes_nothing(
    kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [Stage(tmp_path / name, MAKERS["hyperband"]) for name in ("undisturbed", "study")]
    for stage in stages:
        stage.run(backend(unsteady(0, 3)))
        retry(stage)
    stages[0].run(backend())
    assert run_with_kills(kind, when, lambda: stages[1].run(backend()), monkeypatch)
    assert stages[1].outcome() == stages[0].outcome()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([9], r"has no trial 9; its trials are 0-3"),
        ([1, 0], r"trial 0 of the study in .* has not failed, it is complete"),
        ([], r"no trial of the study in .* is named"),
    ],
    ids=["unknown", "well", "none"],
)
def test_what_cannot_be_tried_again_is_refused_in_words(numbers: list[int], words: str, tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    stage.run(backend(unsteady(1)))
    with pytest.raises(ShoalError, match=words):
        Study(stage.directory).retry(numbers)
    assert not (stage.directory / "requests").exists()
