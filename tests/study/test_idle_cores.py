"""Cores of CPU slots without a job are lent to the jobs on other slots: the commands of a plan."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.command import Step, UpdateJob
from shoal.core.device import Device
from shoal.core.event import Ended, Outcome, Report, Reported
from shoal.core.job import JobUpdate, Purpose
from shoal.plan.shares import MIN_EPOCHS, CrowdingMeter
from shoal.study.idle_cores import lend_idle_cores
from shoal.study.jobs import RunningJobs
from shoal.testing.backends import scripted_job


def slot(name: str, cores: int = 2) -> Device:
    return Device(name, f"cpu/{cores}", 100, cores)


ASH = tuple(slot(f"ash/cpu:{index}") for index in range(4))
OAK = tuple(slot(f"oak/cpu:{index}") for index in range(2))
GPU = Device("ash/cuda:0", "NVIDIA H200", 100, 8)


def study_state(*devices: Device, changes_jobs: bool = True) -> Any:
    running = RunningJobs()
    idle = lambda: [each for each in devices if each.healthy and not running.on(each.name)]  # noqa: E731
    config = SimpleNamespace(teams=changes_jobs)
    return SimpleNamespace(running=running, step=Step(), config=config, crowding=CrowdingMeter(), idle=idle)


def begin(state: Any, name: str, device: Device, purpose: Purpose = Purpose.TRAIN) -> None:
    state.running.begin(replace(scripted_job(name), purpose=purpose), device, 0.0)


def end(state: Any, name: str) -> None:
    state.running.end(Ended(name, Outcome.FINISHED), Outcome.FINISHED, 1.0)


def commanded(state: Any) -> dict[str, int | None]:
    """Cores of the jobs that the next plan changes."""
    state.step = Step()
    lend_idle_cores(state)
    found = {}
    for command in state.step.commands:
        assert isinstance(command, UpdateJob)
        assert command.update == JobUpdate(cores=command.update.cores)
        found[command.job] = command.update.cores
    return found


def test_idle_slots_lend_their_cores_until_they_have_a_job() -> None:
    state = study_state(*ASH)
    for index in range(4):
        begin(state, f"job-{index}", ASH[index])
    assert commanded(state) == {}
    end(state, "job-3")
    assert commanded(state) == {"job-1": 3, "job-2": 3}, "two cores for three jobs"
    end(state, "job-2")
    assert commanded(state) == {"job-0": 4, "job-1": 4}
    assert commanded(state) == {}
    end(state, "job-1")
    assert commanded(state) == {"job-0": 8}
    begin(state, "job-4", ASH[1])
    assert commanded(state) == {"job-0": 4, "job-4": 4}
    begin(state, "job-5", ASH[2])
    begin(state, "job-6", ASH[3])
    assert commanded(state) == {"job-0": 2, "job-4": 2}
    for name in ("job-0", "job-4", "job-5", "job-6"):
        end(state, name)
    assert commanded(state) == {}


NOT_LENT = {
    "no slot is idle": (ASH[:1], ASH[0], Purpose.TRAIN, True),
    "an idle slot of another machine": ((ASH[0], *OAK), ASH[0], Purpose.TRAIN, True),
    "an idle slot without health": ((ASH[0], replace(ASH[1], healthy=False)), ASH[0], Purpose.TRAIN, True),
    "a job on a GPU": ((ASH[0], GPU), GPU, Purpose.TRAIN, True),
    "an idle GPU": ((ASH[0], GPU), ASH[0], Purpose.TRAIN, True),
    "a job that measures": (ASH, ASH[0], Purpose.PROFILE, True),
    "a job that cannot be changed": (ASH, ASH[0], Purpose.TRAIN, False),
}


@pytest.mark.parametrize(("devices", "device", "purpose", "changes_jobs"), NOT_LENT.values(), ids=NOT_LENT)
def test_no_cores_are_lent_for(
    devices: tuple[Device, ...], device: Device, purpose: Purpose, changes_jobs: bool
) -> None:
    state = study_state(*devices, changes_jobs=changes_jobs)
    begin(state, "job-0", device, purpose)
    assert commanded(state) == {}


def test_epochs_on_lent_cores_are_not_measured_as_those_of_a_slot() -> None:
    state = study_state(*ASH[:2])
    begin(state, "job-0", ASH[0])
    state.crowding.begin(*state.running["job-0"])
    report = Reported("job-0", (Report(0, 1, {"loss": 1.0}, 2.0),))
    epochs = lambda: [state.crowding.epoch(report) for _ in range(MIN_EPOCHS + 2)][-1]  # noqa: E731
    assert epochs().seconds == 2.0
    assert commanded(state) == {"job-0": 4}
    assert epochs() is None
    begin(state, "job-1", ASH[1])
    assert commanded(state) == {"job-0": 2}
    assert epochs().seconds == 2.0
