"""The memory of stopped trials is given to others once their job has let them go: events in, commands out."""

from typing import Any

from machine import JOB, Machine

from shoal.core.command import UpdateJob
from shoal.core.event import MembersLeft
from shoal.core.request import Request
from shoal.core.rows import Intervention
from shoal.core.trial import Report, TrialState


def joined(commands: list[Any]) -> list[int]:
    changes = [command.update for command in commands if isinstance(command, UpdateJob)]
    return [member.trial.number for change in changes for array in change.join for member in array.members]


def test_a_stopped_trial_makes_room_when_its_job_has_let_it_go_and_at_once() -> None:
    machine = Machine()
    machine.step(Request("one", "stop", trials=(machine.first,)), 2.0)
    assert joined(machine.plan(2.0)) == []
    assert machine.members == [machine.first, machine.second]
    machine.step(MembersLeft(JOB, frozenset({machine.first})), 2.1)
    assert joined(machine.plan(2.1)) == [machine.third]
    assert set(machine.members) == {machine.second, machine.third}


def test_a_job_whose_members_all_leave_gets_no_others() -> None:
    machine = Machine()
    machine.step(Request("one", "stop", trials=(machine.first, machine.second)), 2.0)
    assert joined(machine.plan(2.0)) == []
    assert machine.members == []


def test_a_trial_that_its_job_has_let_go_does_not_keep_its_memory_whatever_the_study_learns_later() -> None:
    machine = Machine()
    without_loss = Report(machine.first, 2, {"other": 1.0})
    machine.report(2.0, without_loss, Report(machine.first, 5, {"loss": 1.0}, 1.0, TrialState.PAUSED))
    assert machine.core.state.trials[machine.first].state is TrialState.FAILED
    assert joined(machine.plan(2.0)) == [machine.third]


def test_a_failed_trial_is_retried_once_its_job_has_let_it_go() -> None:
    machine = Machine()
    machine.report(2.0, Report(machine.first, 2, {"other": 1.0}))
    rows, _ = machine.step(Request("one", "retry", trials=(machine.first,)), 2.0)
    refused = [row.refused for row in rows if isinstance(row, Intervention)]
    assert refused == [(f"trial {machine.first} is still in {JOB}; try again in a moment",)]
    machine.step(MembersLeft(JOB, frozenset({machine.first})), 2.1)
    rows, _ = machine.step(Request("two", "retry", trials=(machine.first,)), 2.1)
    assert [row.trials for row in rows if isinstance(row, Intervention)] == [(machine.first,)]
