"""Jobs that share a GPU have limits of memory: commands when jobs come and go, and what a worker does with them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.core.command import Step, UpdateJob
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.event import Ended, Outcome
from shoal.core.job import Job, JobUpdate
from shoal.plan.shares import UNMEASURED_BYTES
from shoal.spec import StudySpec
from shoal.study.jobs import RunningJobs
from shoal.study.planning import _limit_memory, _unlimited
from shoal.testing.backends import scripted_job
from shoal.train.memory import limit_memory

GPU, OTHER, SLOT = (Device(name, "H200", 100) for name in ("cuda:0", "cuda:1", "cpu:0"))


def job(name: str, memory: int) -> Job:
    return replace(scripted_job(name), demand=Demand(0.5, memory, 1.0, 10.0))


def study_state(limit: Any = "auto") -> Any:
    spec = StudySpec(metric="loss", mode="min", memory_limit=limit)
    return SimpleNamespace(running=RunningJobs(), step=Step(), config=SimpleNamespace(spec=spec))


def limits(state: Any) -> dict[str, int | None]:
    """The limits that the next plan commands."""
    state.step = Step()
    _limit_memory(state)
    found = {}
    for command in state.step.commands:
        assert isinstance(command, UpdateJob)
        assert command.update == JobUpdate(memory_limit=command.update.memory_limit)
        found[command.job] = command.update.memory_limit
    return found


def test_limits_follow_the_neighbours_and_the_reservation() -> None:
    state = study_state()
    state.running.begin(job("first", 40), GPU, 0.0)
    state.running.begin(job("elsewhere", 40), OTHER, 0.0)
    for name in ("one", "two"):
        state.running.begin(job(name, 40), SLOT, 0.0)
    assert limits(state) == {}, "each is alone on its GPU"
    state.running.begin(replace(job("second", 20), memory_limit=25 + UNMEASURED_BYTES), GPU, 0.0)
    assert limits(state) == {"first": 50 + UNMEASURED_BYTES}, "the second was given its limit when it started"
    assert limits(state) == {}
    state.running.change(replace(state.running["first"][0], demand=Demand(0.5, 60, 1.0, 10.0)))
    assert limits(state) == {"first": 75 + UNMEASURED_BYTES}, "members have joined it"
    state.running.end(Ended("second", Outcome.FINISHED), Outcome.FINISHED, 1.0)
    assert limits(state) == {"first": 0}


@pytest.mark.parametrize(
    ("limit", "first"), [("auto", 50 + UNMEASURED_BYTES), ("8GiB", 50 + UNMEASURED_BYTES), (None, None)]
)
def test_without_a_limit_neighbours_have_none(limit: Any, first: int | None) -> None:
    state = study_state(limit)
    state.running.begin(job("first", 40), GPU, 0.0)
    starting = replace(job("second", 20), memory_limit=25 + UNMEASURED_BYTES)
    state.running.begin(starting, GPU, 0.0)
    assert limits(state).get("first") == first
    assert _unlimited([(starting, GPU)]) == [(job("second", 20), GPU)]


@pytest.mark.parametrize(("limit", "fraction"), [(0, 1.0), (20, 0.25), (100, 1.0)])
def test_a_worker_limits_what_torch_may_reserve(limit: int, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: calls.append(given))
    limit_memory(torch.device("cpu"), limit)
    assert calls == []
    limit_memory(torch.device("cuda:0"), limit)
    assert calls == [(fraction, torch.device("cuda:0"))]
