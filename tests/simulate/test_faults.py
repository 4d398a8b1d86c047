"""Studies that are made up from a seed, and disturbed: what has to hold does, and a seed always gives the same.

A seed gives an algorithm, a space, devices of several kinds and nodes, a policy, what trials cost and report, and what
goes wrong: the engine is killed between any two steps of commit and action, disks are full, jobs crash, hang and run
out of memory, devices are lost and come back, events come late, twice and in another order, and people intervene. What
has to hold is in `tests/support/invariants.py`. A seed that fails gives the same failure again.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support import random_studies
from support.faults import FAULTS
from support.simulation import simulate

from shoal.core.array import Member
from shoal.core.command import Step
from shoal.core.event import Ended, Outcome
from shoal.core.rows import ReportRow, Row, TrialRow
from shoal.core.trial import TrialState
from shoal.journal.writer import Journal
from shoal.plan import job_tracker, partition, views
from shoal.study import core, planning
from shoal.study.engine import Engine
from shoal.study.retention import Retention
from shoal.study.state import StudyState
from shoal.study.trials import TrialTable

SEEDS, AT_ONCE = 2000, 25
"""Seeds of a thorough run, and of one test."""
FAULTY = 200
"""Seeds within which each deliberate fault has to be found."""


def check(seeds: Iterable[int]) -> None:
    for seed in seeds:
        found = simulate(seed)
        assert not found.violation, f"seed {seed}, with {dict(found.faults)}"
        assert found.steps


@pytest.mark.in_turns(SEEDS // AT_ONCE)
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_what_has_to_hold_of_a_disturbed_study_does(first: int) -> None:
    check(range(first, first + AT_ONCE))


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("seed", range(5))
def test_so_it_does_where_more_wait_than_are_planned_for_in_a_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_ARRAYS", 1)
    monkeypatch.setattr(partition, "MIN_ARRAYS", 1)
    monkeypatch.setattr(partition, "ARRAYS_PER_DEVICE", 1)
    monkeypatch.setattr(planning, "HORIZON", 1)
    monkeypatch.setattr(planning, "CLASSES_PER_DEVICE", 1)
    check([seed])


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("first", range(1000, 1020, 5))
def test_so_it_does_where_jobs_grow_at_every_chance(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_studies, "POLICY_NAMES", [])
    monkeypatch.setattr(views, "TRIAL_EPOCHS", 1)
    monkeypatch.setattr(job_tracker, "SWITCH_SECONDS", 0.01)
    check(range(first, first + 5))


def test_a_seed_gives_the_same_study_and_the_same_faults(tmp_path: Path) -> None:
    one, again = (simulate(7, base=tmp_path) for _ in range(2))
    assert one == again
    assert one.faults
    assert one.faults.keys() <= FAULTS.keys()


Function = Callable[..., Any]


def lost_on_commit(write: Function) -> Function:
    """Of the second epochs of every third trial nothing is written."""

    def wrong(self: Journal, rows: Iterable[Row]) -> None:
        write(self, [row for row in rows if not second_epoch(row)])

    def second_epoch(row: Row) -> bool:
        match row:
            case ReportRow():
                return row.report.trial % 3 == 0 and row.report.epoch == 2
            case TrialRow():
                return row.number % 3 == 0 and row.epoch == 2
        return False

    return wrong


def carried_out_before_commit(apply: Function) -> Function:
    """Jobs are started, changed and ended before the journal knows of it."""

    def wrong(self: Engine, step: Step) -> None:
        apply(self, Step(step.time, [], step.commands))
        apply(self, Step(step.time, step.rows, []))

    return wrong


def started_twice(begin: Function) -> Function:
    """The last of several members of a job goes on waiting."""

    def wrong(self: TrialTable, job: str, device: str, members: Iterable[Member]) -> None:
        some = list(members)
        begin(self, job, device, some[:-1] or some)

    return wrong


def retry_forgotten(requeue: Function) -> Function:
    """Of the trials of a job that failed, one does not wait again."""

    def wrong(self: TrialTable, job: str, trials: Iterable[int] | None, *, failed: bool) -> set[int]:
        left: set[int] = requeue(self, job, trials, failed=failed)
        if failed and left:
            self.move(self[max(left)], TrialState.RUNNING)
        return left

    return wrong


def reservation_kept(end: Function) -> Function:
    """A job that has run out of memory keeps its device."""

    def wrong(state: StudyState, ended: Ended, now: float) -> None:
        held = state.running[ended.job]
        end(state, ended, now)
        if ended.outcome is Outcome.OUT_OF_MEMORY:
            state.running.begin(*held, state.step.time)

    return wrong


def nothing_needed(needed: Function) -> Function:
    """Checkpoints of ended trials are deleted though they are pinned, or others begin with them."""
    return lambda self, state, record: False


@pytest.mark.in_turns
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        pytest.param(Journal, "write", lost_on_commit, id="an event is lost on commit"),
        pytest.param(Engine, "_apply", carried_out_before_commit, id="a command is carried out before its commit"),
        pytest.param(TrialTable, "begin", started_twice, id="a trial is started twice"),
        pytest.param(TrialTable, "requeue", retry_forgotten, id="a retry is forgotten"),
        pytest.param(core, "end_job", reservation_kept, id="a reservation is not given back"),
        pytest.param(Retention, "_needed", nothing_needed, id="a checkpoint that is needed is deleted"),
    ],
)
def test_a_deliberate_fault_is_found(
    owner: Any, name: str, wrong: Callable[[Function], Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    assert any(simulate(seed).violation for seed in range(FAULTY))
