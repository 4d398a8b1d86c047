"""The memory of stopped trials is given to others once their job has let them go: events in, commands out."""

from pathlib import Path
from typing import Any

from shoal.algorithms.grid import Grid
from shoal.core.array import FusionKey
from shoal.core.command import Intervened, UpdateJob
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import MembersLeft, Reported
from shoal.core.objective import Objective
from shoal.core.request import Request
from shoal.core.space import Space, grid
from shoal.core.trial import Report, TrialState
from shoal.cost.history import History
from shoal.planner.grouping import Grouping
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.schedule.registry import make_policy
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceTracker
from shoal.study.event import Due
from shoal.study.fleet import Fleet
from shoal.study.state import CoreConfig

JOB = "job-00001"
GPU = Cluster((Node("node", 16, (Device("gpu", "gpu", 35, 4),)),))
"""A device with memory for two trials, of 10 bytes each beside 10 of their process."""


class Machine:
    """The state machine of a study of three trials of five epochs, of which two run; trial 0 has reported an epoch."""

    def __init__(self) -> None:
        algorithm, history = Grid(5), History("")
        algorithm.bind(Space({"x": grid([1.0, 2.0, 3.0])}), metric="loss", mode="min", seed=0, data_seed=0)
        history.put("net", "data", 32, "gpu", Profile({1: 1.0, 2: 1.1, 4: 1.2}, 10, 1, 10, 10, 1.0, 1.0, mixing=1.05))
        self.core = StudyCore(
            CoreConfig(
                Path("study"), {}, (Objective("loss", "min"),), algorithm, make_policy("fifo"), history,
                DeviceTracker(Fleet(GPU), lambda names: GPU, None, Path("study")), retries=2,
                tuner=OversubscriptionTuner(kinds=()), grouping=Grouping(), key=lambda _: FusionKey("net", "data", 32),
            )
        )  # fmt: skip
        self.plan(0.0)
        self.report(0.5, Report(0, 1, {"loss": 1.0}))
        self.plan(1.0)
        self.first, self.second = self.members
        self.third = 3 - self.first - self.second

    def step(self, event: Any, now: float) -> tuple[list[Any], list[Any]]:
        step = self.core.step(event, now)
        return list(step.records), list(step.commands)

    def plan(self, now: float) -> list[Any]:
        return [command for due in Due for command in self.step(due, now)[1]]

    def report(self, now: float, *reports: Report) -> None:
        self.step(Reported(JOB, reports), now)

    @property
    def members(self) -> list[int]:
        job, _ = self.core.state.running[JOB]
        return [member.trial.number for member in self.core.state.trials.present(job).members]


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
    records, _ = machine.step(Request("one", "retry", trials=(machine.first,)), 2.0)
    refused = [record.refused for record in records if isinstance(record, Intervened)]
    assert refused == [(f"trial {machine.first} is still in {JOB}; try again in a moment",)]
    machine.step(MembersLeft(JOB, frozenset({machine.first})), 2.1)
    records, _ = machine.step(Request("two", "retry", trials=(machine.first,)), 2.1)
    assert [record.trials for record in records if isinstance(record, Intervened)] == [(machine.first,)]
