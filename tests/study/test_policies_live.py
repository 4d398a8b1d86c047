"""Every policy decides in a live study as its paper says; jobs that are suspended and resumed learn what they learn
undisturbed.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs
import pytest
import tasks
from plain import check_equal, check_plain, curves, jobs, tune

import shoal
from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.plan.schedule import (
    POLICIES,
    Convergence,
    Fifo,
    JobState,
    JobView,
    Plan,
    Policy,
    Refusal,
    Resize,
    Resume,
    Start,
    Stop,
    Suspend,
)
from shoal.plan.schedule.time_sharing import TimeSharing
from shoal.programs.opaque import Command

WIDTHS = {
    "lr": shoal.grid([0.02, 0.1]),
    "width": shoal.grid([4, 5, 6, 7]),
    "momentum": 0.5,
    "step_size": 2,
}
"""Four structures of two trials each: more jobs than devices."""


def eager(name: str) -> Policy:
    """The policy, its turns as short as can be."""
    made = POLICIES[name]
    return made(quantum=0.001) if issubclass(made, TimeSharing) else made()


@dataclass(frozen=True)
class Restless(Policy):
    """Does to every job, at every turn, all that may be done to it; the oldest first."""

    ends: bool = False

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        free = [device.name for _, device in cluster if not any(device.name in job.devices for job in jobs)]
        actions: list[Any] = []
        refusals = []
        for job in jobs:
            if job.state is JobState.RUNNING:
                if job.preemptible:
                    actions.append(Stop(job.id, "it is time") if self.ends else Suspend(job.id))
                    refusals += [] if self.ends else [Refusal(job.id, "not in two turns running")]
            elif free:
                kind = Resume if job.state is JobState.SUSPENDED else Start
                actions.append(kind(job.id, (free.pop(0),)))
            else:
                refusals.append(Refusal(job.id, "one job a device"))
        return Plan(tuple(actions), tuple(refusals), wake=now + 0.001)


@dataclass(frozen=True)
class Mover(Policy):
    """Starts jobs side by side on one device, and moves them to the other as soon as they may be moved."""

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        first, second = (device.name for _, device in cluster)
        here = sum(first in job.devices for job in jobs)
        there = sum(second in job.devices for job in jobs)
        actions: list[Any] = []
        refusals = []
        for job in jobs:
            if job.state is JobState.RUNNING:
                if job.preemptible and first in job.devices and not there:
                    actions.append(Resize(job.id, (second,)))
                    there += 1
            elif job.state is JobState.SUSPENDED and not there:
                actions.append(Resume(job.id, (second,)))
                there += 1
            elif job.state is JobState.WAITING and not here:
                actions.append(Start(job.id, (first,)))
                here += 1
            else:
                refusals.append(Refusal(job.id, "waits for its place"))
        return Plan(tuple(actions), tuple(refusals))


def outcomes(study: shoal.Study) -> Counter[str]:
    return Counter(job.outcome for job in jobs(study.directory) if job.purpose is Purpose.TRAIN)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[int, Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(directory / "cache"))
        study = tune(tasks.Momentum(), WIDTHS, directory / "study", devices="cpu:2", policy=Fifo())
    assert set(outcomes(study)) == {"finished"}
    return curves(study.directory)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough) for name in POLICIES],
)
def test_under_every_policy_trials_learn_what_they_learn_under_fifo(
    name: str, undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    study = tune(tasks.Momentum(), WIDTHS, tmp_path / "study", devices="cpu:2", policy=eager(name))
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    check_equal(curves(study.directory), undisturbed)
    if name == "convergence":
        assert outcomes(study)["suspended"] >= 2


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        (Restless(), "suspended"),
        pytest.param(Restless(ends=True), "stopped", marks=pytest.mark.thorough),
        (Mover(), "suspended"),
    ],
)
def test_jobs_that_never_come_to_rest_learn_the_same(
    policy: Policy, outcome: str, undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    study = tune(tasks.Momentum(), WIDTHS, tmp_path / "study", devices="cpu:2", policy=policy)
    assert outcomes(study)[outcome] >= 2
    check_equal(curves(study.directory), undisturbed)


@pytest.mark.thorough
def test_the_journal_shows_both_ends_of_a_suspension(tmp_path: Path) -> None:
    study = tune(tasks.Momentum(), WIDTHS, tmp_path / "study", policy=Restless(), algorithm=shoal.Grid(epochs=3))
    rows = {job.id: job for job in jobs(study.directory) if job.purpose is Purpose.TRAIN}
    suspended = {job.id for job in rows.values() if job.outcome == "suspended"}
    resumed = [job for job in rows.values() if job.message.startswith("continues with ")]
    assert suspended
    assert {job.message.split("\n")[0].removeprefix("continues with ") for job in resumed} == suspended
    for job in resumed:
        before = rows[job.message.split("\n")[0].removeprefix("continues with ")]
        assert set(job.trials) <= set(before.trials)
        assert before.ended is not None
        assert before.ended <= job.started
        assert before.message.endswith("suspended by the policy")


def test_a_search_whose_trials_leave_and_are_promoted_while_others_are_suspended(tmp_path: Path) -> None:
    algorithm = shoal.ASHA(8, max_epochs=9, eta=3, concurrency=6)
    study = tune(tasks.Momentum(), WIDTHS, tmp_path / "study", algorithm=algorithm, devices="cpu:2", policy=Restless())
    assert outcomes(study)["suspended"] >= 4
    assert all(row.state.final for row in study.trials)
    check_plain(study, tasks.Momentum())


FALLING = {"start": 1.0, "rate": shoal.grid([0.9, 0.5, 0.99])}
"""Three programs whose losses fall at different speeds."""


@pytest.mark.parametrize("kind", ["function", pytest.param("command", marks=pytest.mark.thorough)])
def test_programs_that_are_suspended_go_on_where_they_were(kind: str, tmp_path: Path) -> None:
    """Its turn is over when it reports, so each is suspended after its first report."""
    function: Any = programs.falls
    if kind == "command":
        (tmp_path / "falls.py").write_text(programs.FALLS)
        line = (sys.executable, str(tmp_path / "falls.py"), "{start}", "{rate}", "{directory}")
        function = Command(line, ("loss",), tmp_path)
    study = programs.search(function, tmp_path, FALLING, devices="cpu:1", policy=Convergence(quantum=0.001))
    assert [(row.state, row.epoch) for row in study.trials] == [(TrialState.COMPLETE, 4)] * 3
    assert outcomes(study)["suspended"] >= 2
    for row in study.trials:
        found = [report.metrics["loss"] for report in programs.curve(study, row.number)]
        assert found == pytest.approx([row.config["rate"] ** epoch for epoch in range(4)])


@pytest.mark.parametrize("name", ["convergence", "expected_finish"])
def test_without_a_loss_a_policy_that_compares_losses_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=f"{name!r} compares losses.*loss=, --loss"):
        programs.search(
            programs.falls, tmp_path, FALLING, policy=name, metric="score", mode="max", devices="cpu:1",
            algorithm=shoal.Grid(1),
        )  # fmt: skip
    assert not (tmp_path / "study").exists()


def test_a_study_that_has_ended_compares_no_losses(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"metric": "score", "mode": "max", "devices": "cpu:1", "algorithm": shoal.Grid(1)}
    study = programs.search(programs.falls, tmp_path, {"start": 1.0, "rate": 0.9}, policy="fifo", **settings)
    assert shoal.resume(study.directory, policy="convergence").trials == study.trials
