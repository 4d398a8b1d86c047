"""The server of a study that is still to come: it imports meanwhile, and serves that study."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import local_scripts as scripts
import pytest

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run import Local, launcher
from shoal.run.base import Backend, Event, JobControl, Reported
from shoal.run.launcher import begin_imports, imported_libraries
from shoal.testing.backends import events_until_ended, scripted, scripted_job

CPU = Device("cpu:0", "cpu", memory=2**30)


@pytest.fixture(autouse=True)
def another_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No fork of this process, no server of another test, and none for another test."""

    def end_idle() -> None:
        while launcher._IDLE_PROCESSES:
            launcher._IDLE_PROCESSES.pop().close()

    monkeypatch.setattr("shoal.run.launcher.prepare_fork", lambda: "the test asks for a new process")
    end_idle()
    yield
    end_idle()


def server_of_a_job(backend: Backend) -> int:
    backend.start(scripted_job("a"), CPU)
    reported = events_until_ended(backend, ["a"])["a"][0]
    assert isinstance(reported, Reported), reported
    return int(reported.reports[0].metrics["server"])


@pytest.mark.parametrize(
    "runner", ["shoal.testing.backends:follow", "slow_runner:follow", "nowhere:run"], ids=["usual", "slow", "missing"]
)
def test_the_process_that_imports_early_serves_the_study(runner: str, tmp_path: Path, gate: Path) -> None:
    begin_imports(runner)
    (early,) = launcher._IDLE_PROCESSES
    begin_imports(runner)
    assert list(launcher._IDLE_PROCESSES) == [early], "one is enough"
    with scripted(Local, tmp_path, scripts.returns) as backend, gate.open("r+b", buffering=0):
        assert server_of_a_job(backend) == early.pid
    begin_imports(runner)
    assert list(launcher._IDLE_PROCESSES) == [early], "that of the last study has imported"


def imports_of(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    names = ("colorsys", "json.tool")
    yield Reported(job.id, (Report(0, 1, {name: float(name in sys.modules) for name in names}),))


def test_libraries_are_imported_once_for_all_workers(tmp_path: Path) -> None:
    begin_imports("shoal.testing.backends:follow", ["no_such_library", "colorsys"])
    with scripted(Local, tmp_path, imports_of) as backend:
        backend.start(scripted_job("a"), CPU)
        reported = events_until_ended(backend, ["a"])["a"][0]
        assert isinstance(reported, Reported), reported
        assert reported.reports[0].metrics == {"colorsys": 1.0, "json.tool": 0.0}


def test_modules_of_large_libraries_are_those_that_tasks_may_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn.anything", "sklearning", "my_module"):
        monkeypatch.setitem(sys.modules, name, sys)
    found = imported_libraries()
    assert "sklearn.anything" in found
    assert not {"sklearning", "my_module", "torch"} & set(found)


def test_one_that_has_ended_or_has_another_environment_is_not_used(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_imports("slow_runner:follow")
    (early,) = launcher._IDLE_PROCESSES
    os.kill(early.pid, signal.SIGKILL)
    early.wait()
    begin_imports("slow_runner:follow")
    (second,) = launcher._IDLE_PROCESSES
    assert second is not early
    monkeypatch.setenv("ANOTHER", "one")
    with scripted(Local, tmp_path, scripts.returns) as backend:
        assert server_of_a_job(backend) not in (early.pid, second.pid)
