"""The loop of a study whose policy suspends and resumes: what the journal says, and what a kill leaves of it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_engine import Scripted, Stage, backend, cluster, four, nothing, run_with_kills, walk_with_kills, well

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.algorithms.hyperband import Hyperband
from shoal.core.device import Cluster, Device
from shoal.core.errors import DeviceError
from shoal.core.job import Job, Purpose
from shoal.core.rows import JobRow, ReportRow, Row, TrialRow
from shoal.core.trial import TrialState
from shoal.host.fleet import Fleet
from shoal.journal.statistics import StudyStatistics
from shoal.plan.schedule.base import JobState, JobView, Plan, Policy, Refusal, Resize, Resume, Start, Stop, Suspend
from shoal.run.base import Ended, Event, Outcome, Reported


@dataclass(frozen=True)
class Restless(Policy):
    """Suspends whoever runs, or moves it to a free device; resumes or starts the oldest job that does not run."""

    moves: bool = False

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        free = [device.name for _, device in cluster if not any(device.name in job.devices for job in jobs)]
        actions: list[Any] = []
        refusals = []
        for job in jobs:
            if job.state is JobState.RUNNING:
                if job.preemptible and self.moves and free:
                    actions.append(Resize(job.id, (free.pop(),)))
                elif job.preemptible and not self.moves:
                    actions.append(Suspend(job.id))
                    refusals.append(Refusal(job.id, "a turn is over"))
            elif free:
                kind = Resume if job.state is JobState.SUSPENDED else Start
                actions.append(kind(job.id, (free.pop(),)))
            else:
                refusals.append(Refusal(job.id, "another turn comes"))
        return Plan(tuple(actions), tuple(refusals))


@dataclass(frozen=True)
class Parks(Policy):
    """Suspends the first job that may be, and never resumes any; others have one device each, or it stops them all."""

    stops: bool = False

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        free = [device.name for _, device in cluster if not any(device.name in job.devices for job in jobs)]
        actions: list[Any] = []
        refusals = []
        parked = any(job.state is JobState.SUSPENDED for job in jobs)
        for job in jobs:
            if job.state is JobState.RUNNING and job.preemptible and not parked:
                actions.append(Suspend(job.id))
                refusals.append(Refusal(job.id, "is parked"))
                parked = True
            elif job.state is JobState.SUSPENDED and self.stops:
                actions.append(Stop(job.id, "parked for long enough"))
            elif job.state is JobState.WAITING and free:
                actions.append(Start(job.id, (free.pop(),)))
            elif job.state is not JobState.RUNNING:
                refusals.append(Refusal(job.id, "is parked"))
        return Plan(tuple(actions), tuple(refusals))


@dataclass
class Recording(Scripted):
    """Notes what the journal says of a job when it is asked to stop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.look: Callable[[str], None] = lambda job: None

    def stop(self, job: str) -> None:
        self.look(job)
        super().stop(job)


MAKERS: dict[str, Callable[[], Algorithm]] = {
    "hyperband": lambda: Hyperband(9, brackets=1),
    "asha, stopping": lambda: ASHA(9, max_epochs=9, concurrency=4, variant="stopping"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_study_whose_jobs_never_rest_ends_as_any_other(make: Callable[[], Algorithm], tmp_path: Path) -> None:
    undisturbed, stage = Stage(tmp_path / "undisturbed", make), Stage(tmp_path / "study", make, slots=2)
    undisturbed.run(backend())
    stage.run(backend(), Restless())
    assert [purpose for purpose, outcome in stage.jobs() if outcome == "suspended"].count("train") >= 4
    assert stage.outcome() == undisturbed.outcome()


def test_kills_at_random_while_jobs_are_suspended_lose_no_trial(
    turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, stage = Stage(tmp_path / "undisturbed"), Stage(tmp_path / "study", slots=2)
    undisturbed.run(backend())
    assert walk_with_kills(turn, lambda: stage.run(backend(), Restless()), monkeypatch)
    assert stage.outcome() == undisturbed.outcome()


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [TrialRow, JobRow, ReportRow])
def test_a_kill_while_jobs_are_suspended_loses_no_trial(
    kind: type[Row], when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, stage = Stage(tmp_path / "undisturbed"), Stage(tmp_path / "study", slots=2)
    undisturbed.run(backend())
    kills = run_with_kills(kind, when, lambda: stage.run(backend(), Restless()), monkeypatch)
    assert kills > 0
    assert stage.outcome() == undisturbed.outcome()


def test_a_suspension_is_in_the_journal_before_the_job_is_asked(tmp_path: Path) -> None:
    stage, seen = four(tmp_path / "study"), []

    def look(job: str) -> None:
        (row,) = [row for row in journal.jobs() if row.id == job]
        seen.append((row.ended, row.outcome, row.message.split("\n")[-1]))

    with closing(stage.open()) as journal:
        carrier = Recording(well, at_once=False, on_start=nothing)
        carrier.look = look
        engine = stage.engine(journal, carrier, Restless())
        engine.begin()
        engine.run()
        suspended = [row for row in journal.jobs() if row.outcome == "suspended"]
    assert len(suspended) >= 4
    assert seen.count((None, "", "suspended by the policy")) >= len(suspended)


def test_trials_of_a_suspended_job_wait_with_the_policys_reason(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    with pytest.raises(DeviceError, match="4 trials can never start: is parked"):
        stage.run(backend(), Parks())
    with closing(stage.open()) as journal:
        assert StudyStatistics(journal).waiting() == {"is parked": [0, 1, 2, 3]}
        assert [row.failures for row in journal.trials()] == [0] * 4
    stage.run(backend())
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


@pytest.mark.parametrize(("kind", "resumes"), [("cpu", True), ("H200", False)])
def test_a_job_is_suspended_again_only_if_its_device_is_of_the_same_kind(
    kind: str, resumes: bool, tmp_path: Path
) -> None:
    """Nothing was measured on a device of another kind, so its trials wait, and their structure is profiled there."""
    stage, carrier = four(tmp_path / "study"), backend()
    with pytest.raises(DeviceError, match="is parked"):
        stage.run(backend(), Parks())
    now = cluster(stage.slots).map(lambda device: replace(device, kind=kind))
    with closing(stage.open()) as journal:
        engine = stage.engine(journal, carrier, fleet=Fleet(now))
        engine.begin()
        engine.run()
    assert any(job.resumes for job in carrier.started) == resumes
    assert any(job.purpose is Purpose.PROFILE for job in carrier.started) != resumes
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def test_a_suspended_job_that_is_stopped_is_cut_anew(tmp_path: Path) -> None:
    stage, carrier = four(tmp_path / "study"), backend()
    stage.run(carrier, Parks(stops=True))
    trained = [job for job in carrier.started if job.purpose is Purpose.TRAIN]
    assert len(trained) > 1
    assert not any(job.resumes for job in trained)
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}


def test_a_job_that_fails_while_it_is_asked_to_leave_is_tried_again_as_any(tmp_path: Path) -> None:
    failed: list[str] = []

    class Failing(Scripted):
        def stop(self, job: str) -> None:
            super().stop(job)
            if not failed:
                failed.append(job)
                self._events[job] = [Ended(job, Outcome.CRASHED, "while it saved")]

    stage, carrier = four(tmp_path / "study"), Failing(well, at_once=False, on_start=nothing)
    stage.run(carrier, Restless())
    assert failed
    assert {row[2] for row in stage.outcome()} == {TrialState.COMPLETE}
    with closing(stage.open()) as journal:
        assert max(row.failures for row in journal.trials()) == 1
        (crashed,) = [row for row in journal.jobs() if row.outcome == "crashed"]
    assert (crashed.id, crashed.message) == (failed[0], "suspended by the policy\nwhile it saved")


def test_nothing_new_comes_to_a_job_that_is_about_to_leave(tmp_path: Path) -> None:
    """Of two devices one is left by a job that takes its time; meanwhile nobody joins it or takes its place."""
    leaving: set[str] = set()
    held: dict[str, str] = {}

    class Slow(Scripted):
        def start(self, job: Job, device: Device) -> None:
            assert device.name not in held.values(), f"{job.id} is started beside another on {device.name}"
            held[job.id] = device.name
            super().start(job, device)

        def stop(self, job: str) -> None:
            leaving.add(job)

        def change(self, job: str, change: Any) -> None:
            assert job not in leaving or not change.join
            super().change(job, change)

        def poll(self, timeout: float) -> list[Event]:
            events = super().poll(timeout)
            for event in events:
                if isinstance(event, Reported) and event.job in leaving and len(self._events[event.job]) > 2:
                    super().stop(event.job)
                if isinstance(event, Ended):
                    del held[event.job]
            return events

    stage = Stage(tmp_path / "study", slots=2)
    stage.run(Slow(well, at_once=False, on_start=nothing), Restless())
    assert leaving
    undisturbed = Stage(tmp_path / "undisturbed")
    undisturbed.run(backend())
    assert stage.outcome() == undisturbed.outcome()
