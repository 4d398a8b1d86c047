"""Cores of CPU slots without a job are lent to the jobs on other slots: what plans command."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.algorithms.grid import Grid
from shoal.core.array import FusionKey
from shoal.core.command import StartJob, UpdateJob
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import Ended, Event, Outcome, Reported
from shoal.core.job import JobUpdate
from shoal.core.request import Request
from shoal.core.space import Space, grid
from shoal.core.trial import Report, TrialState
from shoal.host.fleet import Fleet
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.packing import NoPacking
from shoal.plan.schedule.registry import make_policy
from shoal.plan.shares import MIN_EPOCHS
from shoal.spec import StudySpec
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceTracker
from shoal.study.event import Due
from shoal.study.state import CoreConfig

EPOCHS = 20


def slots(node: str, count: int, cores: int = 2) -> tuple[Device, ...]:
    return tuple(Device(f"{node}/cpu:{index}", f"cpu/{cores}", 100, cores) for index in range(count))


def cluster(*devices: Device) -> Cluster:
    names = dict.fromkeys(device.node for device in devices)
    return Cluster(tuple(Node(name, 64, tuple(x for x in devices if x.node == name)) for name in names))


def cores(commands: Iterable[Any]) -> dict[str, int | None]:
    """Cores by job, of the updates among some commands that change nothing else."""
    updates = [each for each in commands if isinstance(each, UpdateJob)]
    assert all(each.update == JobUpdate(cores=each.update.cores) for each in updates)
    return {each.job: each.update.cores for each in updates}


ASH, OAK = slots("ash", 4), slots("oak", 1)


class Machine:
    """The state machine of a study of trials that train alone, each on a device, and its last commands."""

    def __init__(self, devices: Sequence[Device], trials: int, most_threads: int = 64) -> None:
        algorithm, history, found = Grid(EPOCHS), History(""), cluster(*devices)
        algorithm.bind(Space({"x": grid([float(x) for x in range(trials)])}), metric="loss", mode="min", seed=0,
                       data_seed=0)  # fmt: skip
        profile = Profile({1: 1.0}, 10, 0, base_memory=0, member_memory=60, compute=1.0, cores=1.0)
        for kind in {device.kind for device in devices}:
            history.put("net", "data", 32, kind, profile)
        self.core = StudyCore(
            CoreConfig(
                Path("study"), StudySpec(metric="loss", mode="min", fuse=False), {}, algorithm, make_policy("fifo"),
                history, DeviceTracker(Fleet(found), lambda names: found, None, Path("study")),
                packer=ArrayPacker(NoPacking()), key=lambda _: FusionKey("net", "data", 32), most_threads=most_threads,
            )
        )  # fmt: skip
        self.now = 0.0
        self.step(Due.PROPOSE)

    def step(self, event: Event | Due) -> list[Any]:
        self.now += 10.0
        return list(self.core.step(event, self.now).commands)

    def plan(self) -> dict[str, int | None]:
        """Cores of the jobs that the next two plans change; the first one may start jobs."""
        first = self.step(Due.PLAN)
        return cores(first) | cores(self.step(Due.PLAN))

    def end(self, job: str) -> None:
        (member,) = self.core.state.running[job][0].members
        self.step(Reported(job, (Report(member.trial.number, EPOCHS, {"loss": 1.0}, 1.0, TrialState.PAUSED),)))
        self.step(Ended(job, Outcome.FINISHED))

    def devices(self) -> dict[str, str]:
        return {name: device.name for name, (_, device) in self.core.state.running.items()}


def test_idle_slots_lend_their_cores_until_they_have_a_job() -> None:
    machine = Machine(ASH, trials=4)
    assert machine.plan() == {}
    first, second, third, last = machine.devices()
    machine.end(last)
    assert machine.plan() == {second: 3, third: 3}, "two cores for three jobs"
    machine.end(third)
    assert machine.plan() == {first: 4, second: 4}
    assert machine.plan() == {}
    machine.end(second)
    assert machine.plan() == {first: 8}
    machine.end(first)
    assert machine.plan() == {}


def test_a_slot_has_its_cores_back_with_its_next_job_and_epochs_count_from_then_on() -> None:
    machine = Machine(ASH[:2], trials=2)
    machine.plan()
    first, second = machine.devices()
    epochs = iter(range(1, EPOCHS))

    def seconds() -> list[float]:
        """Measured seconds of some more epochs of the first job, as those of a job alone on a slot."""
        reports = [Reported(first, (Report(0, next(epochs), {"loss": 1.0}, 5.0),)) for _ in range(MIN_EPOCHS + 2)]
        found = [machine.core.state.crowding.epoch(report) for report in reports]
        return [times.seconds for times in found if times is not None]

    assert seconds()
    machine.step(Request("0-0-ada", "pause", trials=(1,)))
    machine.step(Ended(second, Outcome.STOPPED))
    assert machine.plan() == {first: 4}
    assert not seconds()
    machine.step(Request("1-0-ada", "resume", trials=(1,)))
    commands = machine.step(Due.PLAN)
    assert [each.device.name for each in commands if isinstance(each, StartJob)] == [ASH[1].name]
    assert cores(each for each in commands if isinstance(each, UpdateJob)) == {first: 2}
    assert seconds()


def test_nothing_is_lent_while_a_plan_may_start_jobs() -> None:
    machine = Machine(ASH, trials=2)
    machine.step(Due.PLAN)
    assert machine.core.state.running.cores == {}
    assert machine.core.state.last_plan is None


NOT_LENT = {
    "no slot is idle": (ASH[:1], 64),
    "only slots of another machine are idle": ((ASH[0], *OAK), 64),
    "an idle slot that gets no jobs": ((ASH[0], replace(ASH[1], healthy=False)), 64),
    "jobs cannot be changed": (ASH, 0),
    "the user has limited the threads": (ASH, 2),
}


@pytest.mark.parametrize(("devices", "most_threads"), NOT_LENT.values(), ids=NOT_LENT)
def test_no_cores_are_lent(devices: tuple[Device, ...], most_threads: int) -> None:
    machine = Machine(devices, trials=1, most_threads=most_threads)
    assert machine.plan() == {}
    assert [*machine.devices().values()] == [ASH[0].name]


def test_at_most_the_threads_that_the_user_allows_are_lent() -> None:
    assert [*Machine(ASH, trials=1, most_threads=5).plan().values()] == [5]
