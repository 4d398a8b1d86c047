"""Jobs on several devices: what the state machine commands when they grow, shrink, leave, and lose a helper."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.algorithms.grid import Grid
from shoal.core.array import FusionKey
from shoal.core.command import KillJob, StartJob, StopJob, UpdateJob
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import Ended, Event, Outcome, Reported, TeamMeasured
from shoal.core.job import JobUpdate, Purpose
from shoal.core.request import Request
from shoal.core.rows import JobRow, Row, StudyValue
from shoal.core.space import Space, grid
from shoal.core.trial import Report, Trial, TrialState
from shoal.host.fleet import Fleet
from shoal.host.monitor import Condition
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.packing import NoPacking
from shoal.plan.planner import plan
from shoal.plan.schedule.base import Action, JobState, JobView, Plan, Policy, Refusal, Resize, Start, Suspend
from shoal.spec import StudySpec
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceConditions, DeviceTracker
from shoal.study.event import Due, Shutdown
from shoal.study.hangs import HangDetector
from shoal.study.state import CoreConfig

KEY = FusionKey("net", "data", 32)
PROFILE = Profile({1: 1.0}, 10, 0, base_memory=0, member_memory=1, compute=1.0, cores=1.0)
GPUS = Cluster((Node("n0", 8, tuple(Device(f"cuda:{number}", "H200", 100) for number in range(4))),))


def key_of(trial: Trial) -> FusionKey:
    return KEY


class Scripted(Policy):
    """Does what the next call is told to, to running jobs by their ids and to the oldest waiting one by "waiting"."""

    def __init__(self) -> None:
        self.next: list[Action] = []
        self.views: dict[str, JobView] = {}

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        self.views = {job.id: job for job in jobs}
        waiting = [job.id for job in jobs if job.state is not JobState.RUNNING]
        actions, self.next = self.next, []
        actions = [replace(x, job=waiting[0]) if x.job == "waiting" else x for x in actions]
        placed = {action.job for action in actions if isinstance(action, Start)}
        off = [name for name in waiting if name not in placed]
        off += [action.job for action in actions if isinstance(action, Suspend)]
        return Plan(tuple(actions), tuple(Refusal(name, "waits") for name in off))


class Machine:
    """The state machine of a study of so many trials of 20 epochs, and the commands of its last step."""

    def __init__(self, trials: int = 1, spreading: dict[int, float] | None = None) -> None:
        algorithm = Grid(20)
        space = Space({"x": grid([float(number) for number in range(trials)])})
        algorithm.bind(space, metric="loss", mode="min", seed=0, data_seed=0)
        history = History("")
        history.put("net", "data", 32, "H200", PROFILE if spreading is None else profile_with(spreading))
        self.policy, self.study, self.now = Scripted(), dict[str, Any](), 0.0
        hangs = HangDetector(100.0)
        tracker = DeviceTracker(Fleet(GPUS), lambda names: GPUS, hangs, Path("study"))
        self.core = StudyCore(
            CoreConfig(
                Path("study"), StudySpec(metric="loss", mode="min", fuse=False), self.study, algorithm, self.policy,
                history, tracker, packer=ArrayPacker(NoPacking()), key=key_of, teams=True,
            )
        )  # fmt: skip
        self.rows: list[Row] = []
        self.step(Due.PROPOSE)

    def step(self, event: Any, after: float = 1.0) -> list[object]:
        self.now += after
        step = self.core.step(event, self.now)
        self.rows = list(step.rows)
        self.study.update({x.key: x.value for x in step.rows if isinstance(x, StudyValue)})
        return list(step.commands)

    def plan(self, *actions: Action) -> list[object]:
        self.policy.next = list(actions)
        self.core.state.last_plan = None
        return self.step(Due.PLAN)

    def report(self, job: str, trial: int = 0, epoch: int = 1) -> list[object]:
        return self.step(Reported(job, (Report(trial, epoch, {"loss": 1.0}, 10.0),)))

    def message(self, job: str) -> str:
        (row,) = [row for row in self.rows if isinstance(row, JobRow) and row.id == job]
        return row.message

    @property
    def running(self) -> dict[str, str]:
        return {name: device.name for name, (_, device) in self.core.state.running.items()}

    def wide(self, *devices: str) -> "Machine":
        """This machine with its first trial on these devices, after its first report."""
        self.plan(Start("waiting", devices))
        self.report("job-00001")
        return self


def profile_with(spreading: dict[int, float]) -> Profile:
    return Profile({1: 1.0}, 10, 0, 0, 1, compute=1.0, cores=1.0, spreading=spreading)


def described(commands: Sequence[object]) -> list[object]:
    """Each command in a word or two."""
    found: list[object] = []
    for each in commands:
        match each:
            case StartJob(job=job, device=device):
                found.append(("start", job.id, str(job.purpose), job.assists, device.name))
            case UpdateJob(job=name, update=JobUpdate(team=frozenset() as team)):
                found.append(("team", name, *sorted(team)))
            case StopJob(job=name):
                found.append(("stop", name))
            case KillJob(job=name):
                found.append(("kill", name))
            case _:
                found.append(each)
    return found


FAST = {2: 0.5, 3: 0.4}
LEADER, HELPER, SECOND = "job-00001", "job-00002", "job-00003"
BOTH = {LEADER: "cuda:0", HELPER: "cuda:1"}


def test_a_job_starts_on_several_devices() -> None:
    machine = Machine(spreading=FAST)
    assert described(machine.plan(Start("waiting", ("cuda:0", "cuda:1")))) == [
        ("start", LEADER, "train", "", "cuda:0"),
        ("start", HELPER, "assist", LEADER, "cuda:1"),
        ("team", LEADER, HELPER),
    ]
    helper, _ = machine.core.state.running[HELPER]
    assert (helper.purpose, helper.members) == (Purpose.ASSIST, machine.core.state.running[LEADER][0].members)
    machine.report(LEADER)
    machine.plan()
    assert machine.policy.views[LEADER].devices == ("cuda:0", "cuda:1")
    assert list(machine.policy.views) == [LEADER], "a helper is no job of its own for a policy"


def test_a_running_job_grows_without_being_moved() -> None:
    machine = Machine(spreading=FAST).wide("cuda:0")
    assert described(machine.plan(Resize(LEADER, ("cuda:0", "cuda:2", "cuda:1")))) == [
        ("start", HELPER, "assist", LEADER, "cuda:2"),
        ("start", SECOND, "assist", LEADER, "cuda:1"),
        ("team", LEADER, HELPER, SECOND),
    ]
    assert machine.core.state.trials[0].state is TrialState.RUNNING


def test_a_job_shrinks_and_its_device_is_free_once_the_helper_has_left() -> None:
    machine = Machine(2, FAST).wide("cuda:0", "cuda:1")
    commands = machine.plan(
        Resize(LEADER, ("cuda:0",)),
    )
    assert described(commands) == [("team", LEADER), ("stop", HELPER)]
    assert machine.message(HELPER) == f"{LEADER} continues without cuda:1"
    machine.plan(Start("waiting", ("cuda:2",)))
    leaving = machine.policy.views[HELPER]
    assert (leaving.devices, leaving.preemptible, leaving.demand["H200"].compute) == (("cuda:1",), False, 1.0)
    assert machine.policy.views[LEADER].devices == ("cuda:0",)
    assert machine.step(Ended(HELPER, Outcome.STOPPED)) == []
    assert "cuda:1" not in machine.running.values()


def test_a_waiting_job_gets_the_device_in_the_plan_after_the_helper_has_left() -> None:
    machine = Machine(2, FAST).wide("cuda:0", "cuda:1")
    commands = machine.plan(Resize(LEADER, ("cuda:0",)), Start("waiting", ("cuda:1",)))
    assert described(commands) == [("team", LEADER), ("stop", HELPER)]
    assert machine.core.state.trials[1].reason == f"waits until {LEADER} has left cuda:1"
    machine.step(Ended(HELPER, Outcome.STOPPED))
    assert described(machine.plan(Start("waiting", ("cuda:1",)))) == [("start", SECOND, "train", "", "cuda:1")]


CHANGES: dict[str, tuple[Callable[[Machine], list[object]], list[object], dict[str, str]]] = {
    "the helper is exchanged": (
        lambda machine: machine.plan(Resize(LEADER, ("cuda:0", "cuda:3"))),
        [("start", SECOND, "assist", LEADER, "cuda:3"), ("team", LEADER, SECOND), ("stop", HELPER)],
        BOTH | {SECOND: "cuda:3"},
    ),
    "the leader is suspended": (
        lambda machine: machine.plan(Suspend(LEADER)),
        [("stop", LEADER), ("team", LEADER), ("stop", HELPER)],
        BOTH,
    ),
    "the leader is moved": (
        lambda machine: machine.plan(Resize(LEADER, ("cuda:2", "cuda:1"))),
        [("stop", LEADER), ("team", LEADER), ("stop", HELPER)],
        BOTH,
    ),
    "the leader ends": (
        lambda machine: machine.step(Ended(LEADER, Outcome.FINISHED)),
        [("stop", HELPER)],
        {HELPER: "cuda:1"},
    ),
    "the leader crashes": (
        lambda machine: machine.step(Ended(LEADER, Outcome.CRASHED, "signal 9")),
        [("stop", HELPER)],
        {HELPER: "cuda:1"},
    ),
    "the helper is killed": (
        lambda machine: machine.step(Ended(HELPER, Outcome.CRASHED, "signal 9")),
        [("team", LEADER)],
        {LEADER: "cuda:0"},
    ),
    "the helper cannot load the task": (
        lambda machine: machine.step(Ended(HELPER, Outcome.UNUSABLE, "no such module")),
        [("team", LEADER)],
        {LEADER: "cuda:0"},
    ),
    "the device of the helper is lost": (
        lambda machine: lose(machine, "cuda:1"),
        [("kill", HELPER), ("team", LEADER), ("stop", HELPER)],
        BOTH,
    ),
    "the device of the leader is lost": (
        lambda machine: lose(machine, "cuda:0"),
        [("kill", LEADER), ("team", LEADER), ("stop", HELPER)],
        BOTH,
    ),
    "the device of the helper is drained": (
        lambda machine: drain(machine, "cuda:1"),
        [("team", LEADER), ("stop", HELPER)],
        BOTH,
    ),
    "the device of the leader is drained": (
        lambda machine: drain(machine, "cuda:0"),
        [("stop", LEADER), ("team", LEADER), ("stop", HELPER)],
        BOTH,
    ),
    "the helper hangs": (
        lambda machine: hang(machine),
        [("kill", HELPER), ("team", LEADER), ("stop", HELPER)],
        BOTH,
    ),
    "the study shuts down": (
        lambda machine: machine.step(Shutdown(record=True)),
        [("stop", LEADER), ("stop", HELPER)],
        BOTH,
    ),
}


def lose(machine: Machine, device: str) -> list[object]:
    machine.step(DeviceConditions({device: Condition(healthy=False, reason="has fallen off the bus")}))
    return machine.step(Due.CHECK)


def drain(machine: Machine, device: str) -> list[object]:
    machine.step(Request("1", "remove devices", devices=(device,)))
    return machine.step(Due.CHECK)


def hang(machine: Machine) -> list[object]:
    """The leader continues reporting, and the helper says nothing for long."""
    commands: list[object] = []
    epoch = 1
    while not commands:
        epoch += 1
        machine.step(Reported(LEADER, ()), 0.0)
        commands = machine.step(Due.CHECK, 5.0)
        assert epoch < 1000
    return commands


@pytest.mark.parametrize(("change", "commands", "running"), CHANGES.values(), ids=CHANGES)
def test_leaders_and_helpers_leave(
    change: Callable[[Machine], list[object]], commands: list[object], running: dict[str, str]
) -> None:
    machine = Machine(spreading=FAST).wide("cuda:0", "cuda:1")
    assert [x for x in described(change(machine)) if isinstance(x, tuple)] == commands
    assert machine.running == running


FAULTS = [Outcome.CRASHED, Outcome.RAISED, Outcome.OUT_OF_MEMORY, Outcome.STORAGE_FULL, Outcome.REJECTED, Outcome.LOST]


@pytest.mark.parametrize("outcome", FAULTS)
def test_a_failed_helper_blames_no_trial_and_ends_no_study(outcome: Outcome) -> None:
    machine = Machine(spreading=FAST).wide("cuda:0", "cuda:1")
    assert described(machine.step(Ended(HELPER, outcome, "it happened"))) == [("team", LEADER)]
    (row,) = [row for row in machine.rows if isinstance(row, JobRow)]
    assert (row.id, row.outcome, row.message) == (HELPER, outcome, "it happened")
    record = machine.core.state.trials[0]
    assert (record.state, record.failures, machine.running) == (TrialState.RUNNING, 0, {LEADER: "cuda:0"})


def test_after_some_failures_jobs_of_the_key_get_no_helper() -> None:
    machine = Machine(spreading=FAST).wide("cuda:0", "cuda:1")
    for number in range(2, 5):
        machine.plan()
        assert machine.policy.views[LEADER].scaling.devices == 3
        machine.step(Ended(f"job-{number:05d}", Outcome.CRASHED, "signal 9"))
        if number < 4:
            machine.plan(Resize(LEADER, ("cuda:0", "cuda:1")))
    machine.plan()
    assert machine.policy.views[LEADER].scaling.max_devices == 1


def test_a_lost_device_does_not_count_as_a_failure_of_the_helper() -> None:
    machine = Machine(spreading=FAST).wide("cuda:0", "cuda:1")
    for number in range(2, 6):
        machine.step(Ended(f"job-{number:05d}", Outcome.LOST, "the node is gone"))
        machine.plan(Resize(LEADER, ("cuda:0", "cuda:1")))
    assert machine.policy.views[LEADER].scaling.devices == 3


def test_a_job_whose_helper_could_not_take_part_gets_no_other_one() -> None:
    machine = Machine(spreading=FAST).wide("cuda:0", "cuda:1", "cuda:2")
    machine.step(Ended(HELPER, Outcome.FINISHED))
    machine.plan()
    scaling = machine.policy.views[LEADER].scaling
    assert (machine.policy.views[LEADER].devices, scaling.max_devices) == (("cuda:0", "cuda:2"), 2)


def measured(seconds: dict[int, float], note: str = "") -> TeamMeasured:
    return TeamMeasured(LEADER, KEY, 1, seconds, note)


def test_a_device_more_is_tried_and_kept_if_it_pays() -> None:
    machine = Machine().wide("cuda:0")
    machine.plan(Resize(LEADER, ("cuda:0", "cuda:1")))
    assert (machine.policy.views[LEADER].scaling.devices, machine.policy.views[LEADER].scaling.grows) == (1, True)
    assert machine.step(measured({1: 1.0, 2: 0.6})) == []
    assert machine.plan() == []
    scaling = machine.policy.views[LEADER].scaling
    assert (scaling.devices, scaling.grows, scaling.beta) == (2, True, pytest.approx(1.2))
    assert machine.core.state.config.history.get("net", "data", 32, "H200").spreading == {2: 0.6}


def test_a_device_that_does_not_pay_is_given_back_and_not_tried_again() -> None:
    machine = Machine(2).wide("cuda:0")
    machine.plan(Resize(LEADER, ("cuda:0", "cuda:1")))
    machine.step(measured({1: 1.0, 2: 1.1}))
    assert described(machine.plan()) == [("team", LEADER), ("stop", HELPER)]
    assert machine.message(HELPER) == f"steps of {LEADER} are not faster on 2 devices"
    scaling = machine.policy.views[LEADER].scaling
    assert (scaling.devices, scaling.grows) == (1, False)
    machine.plan(Start("waiting", ("cuda:2",)))
    machine.report(SECOND, trial=1)
    machine.plan()
    assert machine.policy.views[SECOND].scaling.max_devices == 1, "nor for other jobs of the key"


def test_steps_that_cannot_be_divided_mean_one_device_and_the_user_reads_why() -> None:
    machine = Machine().wide("cuda:0")
    machine.plan(Resize(LEADER, ("cuda:0", "cuda:1")))
    machine.step(measured({1: 1.0}, "its task has a step of its own"))
    assert "its task has a step of its own" in machine.study["note"]
    assert described(machine.plan()) == [("team", LEADER), ("stop", HELPER)]
    assert machine.policy.views[LEADER].scaling.max_devices == 1
    assert machine.core.state.config.history.get("net", "data", 32, "H200") == PROFILE, "another study may divide them"


def test_a_helper_that_fails_during_shutdown_leaves_no_trial_unsaved() -> None:
    machine = Machine().wide("cuda:0", "cuda:1")
    machine.step(Shutdown(record=True))
    machine.step(Ended(HELPER, Outcome.CRASHED, "killed"))
    assert machine.core.state.unsaved_jobs == []
    machine.step(Ended(LEADER, Outcome.CRASHED, "killed"))
    assert machine.core.state.unsaved_jobs == [f"{LEADER} {Outcome.CRASHED}"]


def test_the_third_device_is_tried_after_the_second_has_paid_only() -> None:
    for times, most in (({2: 0.6}, 3), ({2: 0.6, 3: 0.5}, 4), ({2: 0.6, 3: 0.7}, 2), ({2: 1.0}, 1)):
        machine = Machine(spreading=times).wide("cuda:0")
        machine.plan()
        assert machine.policy.views[LEADER].scaling.max_devices == most


def test_epochs_on_several_devices_do_not_count_as_those_of_one() -> None:
    machine = Machine(spreading=FAST).wide("cuda:0", "cuda:1")
    before = machine.core.state.costs.profile(KEY, "H200")
    for epoch in range(2, 8):
        machine.step(Reported(LEADER, (Report(0, epoch, {"loss": 1.0}, 5.0),)))
    assert machine.core.state.costs.profile(KEY, "H200") == before
    machine.step(Ended(HELPER, Outcome.STOPPED))
    for epoch in range(8, 14):
        machine.step(Reported(LEADER, (Report(0, epoch, {"loss": 1.0}, 20.0),)))
    after = machine.core.state.costs.profile(KEY, "H200")
    assert after is not None
    assert after.step_seconds[1] == pytest.approx(2.0)


def test_where_teams_are_impossible_a_measured_key_has_one_device() -> None:
    machine = Machine(spreading=FAST)
    machine.core.state.config.teams = False
    state = machine.core.state
    state.trials.set_keys({0: KEY})
    given = replace(state.plan_input(GPUS, 0.0), waiting=state.trials.classes(0.0))
    assert not plan(given).starts
    assert machine.policy.views["waiting-0"].scaling.max_devices == 1


EVENTS: list[Event] = [Ended(HELPER, Outcome.STOPPED), Ended(LEADER, Outcome.FINISHED)]


@pytest.mark.parametrize("ends", [EVENTS, EVENTS[::-1]])
def test_after_the_ends_nothing_is_left(ends: list[Event]) -> None:
    machine = Machine(spreading=FAST).wide("cuda:0", "cuda:1")
    for each in ends:
        machine.step(each)
    running, tracker = machine.core.state.running, machine.core.state.tracker
    assert (running.helpers, running.teams, running.dismissed, dict(tracker.leaving)) == ({}, {}, set(), {})
    assert [running.on(f"cuda:{number}") for number in range(4)] == [0] * 4
