"""Every policy decides in a live study as its paper says; jobs that are suspended and resumed learn what they learn
undisturbed.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from typing import Any

import programs
import pytest
import tasks
import torch
from baselines import Slaq
from plain import check_equal, check_plain, curves, jobs, tune
from torch import Tensor, nn
from turns import RULES, check_lengths, check_losses, check_rule, middle, stretches

import shoal
from shoal.core.device import Cluster
from shoal.core.errors import PolicyError
from shoal.core.event import TurnStats
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.opaque import Command
from shoal.schedule import (
    POLICIES,
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
from shoal.schedule.time_sharing import TimeSharing

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


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_trials_learn_what_they_learn_under_fifo(
    name: str, undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    study = tune(tasks.Momentum(), WIDTHS, tmp_path / "study", devices="cpu:2", policy=eager(name))
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    check_equal(curves(study.directory), undisturbed)
    if name == "convergence":
        assert outcomes(study)["suspended"] >= 2


@pytest.mark.parametrize(
    ("policy", "outcome"), [(Restless(), "suspended"), (Restless(ends=True), "stopped"), (Mover(), "suspended")]
)
def test_jobs_that_never_come_to_rest_learn_the_same(
    policy: Policy, outcome: str, undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    study = tune(tasks.Momentum(), WIDTHS, tmp_path / "study", devices="cpu:2", policy=policy)
    assert outcomes(study)[outcome] >= 2
    check_equal(curves(study.directory), undisturbed)


def test_the_journal_shows_both_ends_of_a_suspension(tmp_path: Path) -> None:
    study = tune(tasks.Momentum(), WIDTHS, tmp_path / "study", policy=Restless(), algorithm=shoal.Grid(epochs=3))
    rows = {job.id: job for job in jobs(study.directory) if job.purpose is Purpose.TRAIN}
    suspended = {job.id for job in rows.values() if job.outcome == "suspended"}
    resumed = [job for job in rows.values() if job.message.startswith("goes on with ")]
    assert suspended
    assert {job.message.split("\n")[0].removeprefix("goes on with ") for job in resumed} == suspended
    for job in resumed:
        before = rows[job.message.split("\n")[0].removeprefix("goes on with ")]
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


QUANTUM = 0.1
FALLING = {"start": 1.0, "rate": shoal.grid([0.9, 0.5, 0.99])}
"""Three programs whose losses fall at different speeds."""

TAKE_TURNS = ("convergence", "promise")


class Slow(tasks.Momentum):
    """Takes its time for each step, so that a turn ends within its training."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(0.004)
        return super().loss(model, batch)


def policy_of(name: str, quantum: float = QUANTUM) -> Policy:
    made = POLICIES[name]
    return made(quantum=quantum) if issubclass(made, TimeSharing) else made()


def falling(directory: Path, kind: str, policy: str | Policy, **arguments: Any) -> shoal.Study:
    """A search of three trials, each a job of its own, on one device."""
    settings: dict[str, Any] = {"devices": "cpu:1", "policy": policy, "fuse": False, "algorithm": shoal.Grid(10)}
    settings |= arguments
    if kind == "task":
        space = {"lr": shoal.grid([0.02, 0.1, 0.5]), "width": 4, "momentum": 0.5, "step_size": 2}
        return tune(Slow(), space, directory / "study", backend="local", **settings)
    if kind == "function":
        return programs.search(programs.falls, directory, settings.pop("space", FALLING), **settings)
    (directory / "falls.py").write_text(programs.FALLS)
    line = (sys.executable, str(directory / "falls.py"), "{start}", "{rate}", "{directory}")
    return programs.search(Command(line, ("loss",), directory), directory, FALLING, **settings)


def hermes_turn(turns: Sequence[TurnStats], suspensions: int) -> float:
    """Seconds of the next turn of a job: longer with each quarter by which its loss has fallen, and each suspension."""
    losses = list(map(middle, turns))
    fall = losses[0] - min(losses) if losses else 0.0
    quarters = sum(fall >= part * abs(losses[0]) > 0 for part in (0.25, 0.5, 0.75)) if losses else 0
    return QUANTUM * (1 + quarters + 0.1 * suspensions)


QUICK = {*(("function", name) for name in TAKE_TURNS), ("command", "convergence"), ("task", "convergence")}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.thorough)
        for kind in ("function", "command", "task")
        for name in POLICIES
    ],
)
def test_who_runs_follows_from_the_recorded_losses(kind: str, name: str, tmp_path: Path) -> None:
    study = falling(tmp_path, kind, policy_of(name))
    assert [(row.state, row.epoch) for row in study.trials] == [(TrialState.COMPLETE, 10)] * 3
    found = stretches(study.directory)
    suspensions = sum(stretch.suspended for stretch in found)
    if name not in TAKE_TURNS:
        assert suspensions == 0
        assert len(found) == 3
        return
    assert suspensions >= 2
    if name in RULES:
        assert check_rule(found, RULES[name]) >= suspensions
    check_lengths(found, hermes_turn if name == "convergence" else lambda turns, count: QUANTUM)
    if kind != "task":
        check_losses(study.directory, found)


@pytest.mark.parametrize("loss", ["missing", "nan", "constant", "never"])
def test_losses_that_are_no_good(loss: str, tmp_path: Path) -> None:
    """Those that are missing or not a number do not count; who has none at all waits behind all others."""
    space = {"start": 1.0, "rate": shoal.choice([0.9]), "loss": shoal.grid(["fine", loss])}
    study = falling(tmp_path, "function", Slaq(QUANTUM), space=space, metric="score", mode="max", loss="loss")
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    found = stretches(study.directory)
    assert check_rule(found, RULES["slaq"] if loss != "never" else lambda turns, waited: turns[-1].last) >= 1
    bad = [turn.losses for stretch in found if 1 in stretch.trials for turn in stretch.turns]
    assert any(isinf(turn.last) for turn in bad) or loss != "never"
    assert any(not isinf(turn.last) for turn in bad) or loss == "never"


@pytest.mark.parametrize("name", TAKE_TURNS)
def test_without_a_loss_a_policy_that_compares_losses_is_refused(name: str, tmp_path: Path) -> None:
    settings = {"metric": "score", "mode": "max", "devices": "cpu:1", "algorithm": shoal.Grid(1)}
    with pytest.raises(PolicyError, match=f"{name!r} compares losses.*loss=, --loss"):
        programs.search(programs.falls, tmp_path, FALLING, policy=name, **settings)


def test_a_study_that_has_ended_compares_nothing(tmp_path: Path) -> None:
    settings = {"metric": "score", "mode": "max", "devices": "cpu:1", "algorithm": shoal.Grid(1)}
    study = programs.search(programs.falls, tmp_path, FALLING, policy="fifo", **settings)
    assert shoal.resume(study.directory, policy="convergence").trials == study.trials
    assert not (tmp_path / "study").exists()
