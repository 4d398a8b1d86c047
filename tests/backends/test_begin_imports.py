"""The server of a study that is still to come: it imports meanwhile, and serves that study."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import local_scripts as scripts
import pytest

from shoal.backends import Local, launcher
from shoal.backends.base import Backend, Reported
from shoal.backends.launcher import begin_imports
from shoal.core.device import Device
from shoal.testing.backends import events_until_ended, scripted, scripted_job

CPU = Device("cpu:0", "cpu", memory=2**30)


@pytest.fixture(autouse=True)
def another_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No fork of this process, no server of another test, and none for another test."""

    def end_idle() -> None:
        while launcher._IDLE_PROCESSES:
            launcher._IDLE_PROCESSES.pop().close()

    monkeypatch.setattr("shoal.backends.launcher.prepare_fork", lambda: "the test asks for a new process")
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
def test_the_process_that_imports_early_serves_the_study(runner: str, tmp_path: Path) -> None:
    begin_imports(runner)
    (early,) = launcher._IDLE_PROCESSES
    begin_imports(runner)
    assert list(launcher._IDLE_PROCESSES) == [early], "one is enough"
    with scripted(Local, tmp_path, scripts.returns) as backend:
        assert server_of_a_job(backend) == early.pid
    begin_imports(runner)
    assert list(launcher._IDLE_PROCESSES) == [early], "that of the last study has imported"


def test_one_that_has_ended_or_has_another_environment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
