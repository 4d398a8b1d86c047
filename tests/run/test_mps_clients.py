"""Jobs that are not clients of MPS, and daemons and servers that die: real processes, a fake control program."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mps_fakes as fakes
import psutil
import pytest
from processes import alive, gone, wait_for
from shared_gpu_samples import (
    GPU,
    OTHER_GPU,
    begin,
    daemon_pid,
    job,
    local,
    next_event,
    run_on,
    servers,
    stopped,
)

from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.core.job import Job, Purpose
from shoal.run import Ended, Event, Outcome
from shoal.run.mps import MpsDaemon
from shoal.run.mps_clients import SharedGpu
from shoal.testing.backends import events_until_ended, scripted_job


class TestClients:
    def test_a_job_whose_command_is_the_client_goes_on(self, place: Path) -> None:
        with local(place, fakes.lets_a_child_use_it) as backend:
            begin(backend, job("job"))
            assert run_on(backend) == []
            assert stopped(backend, "job")

    def test_a_job_that_leaves_the_gpu_alone_goes_on(self, place: Path) -> None:
        with local(place, fakes.stays_off) as backend:
            begin(backend, job("job"))
            assert run_on(backend) == []
            assert stopped(backend, "job")

    def test_a_signature_job_that_opens_the_gpu_goes_on(self, place: Path) -> None:
        with local(place, fakes.signature_job) as backend:
            backend.start(replace(scripted_job("job"), purpose=Purpose.SIGNATURE), GPU)
            next_event(backend)
            assert run_on(backend) == []
            assert stopped(backend, "job")

    def test_a_job_that_escapes_the_daemon_is_ended(self, place: Path) -> None:
        with local(place, fakes.escapes) as backend:
            neighbour = begin(backend, job("client"))
            pid = int(begin(backend, job("job"))["pid"])
            (end,) = events_until_ended(backend, ["job"])["job"]
            assert isinstance(end, Ended)
            assert end.outcome is Outcome.LOST
            assert f"worker process {pid} is not a client of the MPS daemon of cuda:0" in end.message
            assert (
                f"pipe directory: {place / 'GPU-0' / 'pipe'}; log: {place / 'GPU-0' / 'log' / 'control.log'}"
                in end.message
            )
            assert end.message.endswith(f"Log: {place / 'study' / 'logs' / 'job.log'}")
            assert not psutil.pid_exists(pid)
            assert alive(neighbour["pid"])
            assert stopped(backend, "client")

    def test_one_that_reports_nothing_is_ended_after_some_looks(self, place: Path) -> None:
        with local(place, silent_stranger) as backend:
            backend.start(job("silent"), GPU)
            (end,) = events_until_ended(backend, ["silent"])["silent"]
        assert isinstance(end, Ended)
        assert "is not a client of the MPS daemon" in end.message

    def test_where_none_was_ever_a_client_the_next_goes_without(
        self, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with local(place, fakes.escapes, "auto") as backend:
            begin(backend, job("first"))
            (end,) = events_until_ended(backend, ["first"])["first"]
            assert isinstance(end, Ended)
            assert end.outcome is Outcome.LOST
            assert begin(backend, job("second"))["set"] == 1
            assert run_on(backend) == []
            assert stopped(backend, "second")
        assert "jobs on cuda:0 share it without MPS: MPS has failed 1 times in a row" in caplog.text

    def test_what_cuda_says_of_mps_is_not_a_fault_of_the_job(self, place: Path) -> None:
        with local(place, fakes.blames_mps, "auto") as backend:
            backend.start(job("job"), GPU)
            (end,) = events_until_ended(backend, ["job"])["job"]
            assert isinstance(end, Ended)
            assert end.outcome is Outcome.LOST
            assert end.message.startswith(f"MPS of cuda:0 failed; log: {place}")
            assert "MPS server is not ready" in end.message
            assert begin(backend, job("again"))["set"] == 1

    def test_what_follows_one_another_closely_has_one_cause(self, place: Path) -> None:
        gpu = SharedGpu("cuda:0", MpsDaemon("GPU-0", place / "GPU-0"))
        for now in (0.0, 1.0, 9.0, 18.0, 30.0):
            gpu.record_failure(now)
        assert gpu.failures == 2


def silent_stranger(each: Job, device: Device, control: object) -> Iterator[Event]:
    with open(os.environ["FAKE_NVIDIA_UVM"], "w"):
        signal.pause()
    yield Ended(each.id, Outcome.FINISHED)


def the_server(place: Path) -> int:
    (server,) = servers(place)
    return server


class TestDeath:
    @pytest.mark.parametrize(
        ("victim", "what"),
        [pytest.param(the_server, "server", id="server"), pytest.param(daemon_pid, "daemon", id="daemon")],
    )
    def test_its_jobs_crash_and_the_next_has_a_new_one(
        self, victim: Callable[[Path], int], what: str, place: Path
    ) -> None:
        with local(place, fakes.uses_gpu) as backend:
            first = [begin(backend, job(name)) for name in ("a", "b")]
            idle = begin(backend, job("idle", compute=0.5))
            assert stopped(backend, "idle")
            elsewhere = begin(backend, job("elsewhere"), OTHER_GPU)
            assert run_on(backend, 0.3) == []
            daemon = daemon_pid(place)
            os.kill(victim(place), signal.SIGKILL)
            ends = events_until_ended(backend, ["a", "b"])
            for name in ("a", "b"):
                (end,) = ends[name]
                assert isinstance(end, Ended)
                assert end.outcome is Outcome.LOST
                log = place / "GPU-0" / "log" / "control.log"
                assert end.message.startswith(f"MPS {what} of cuda:0 died; log: {log}\n"), end.message
            assert all(gone(each["pid"]) for each in (*first, idle))
            assert alive(elsewhere["pid"])
            again = begin(backend, job("a"))
            assert again["pid"] not in [each["pid"] for each in first]
            assert (daemon_pid(place) != daemon) == (what == "daemon"), "a daemon brings a new server itself"
            assert run_on(backend, 0.3) == []
            assert stopped(backend, "a", "elsewhere")

    def test_one_that_dies_while_nothing_runs_is_just_begun_anew(self, place: Path) -> None:
        with local(place, fakes.uses_gpu) as backend:
            begin(backend, job("short"))
            assert events_until_ended(backend, ["short"])["short"] == [Ended("short", Outcome.FINISHED)]
            os.kill(daemon_pid(place), signal.SIGKILL)
            assert run_on(backend) == []
            begin(backend, job("job"))
            assert run_on(backend, 0.3) == []
            assert stopped(backend, "job")

    @pytest.mark.parametrize("name", ["auto", "mps"])
    def test_one_that_keeps_dying_is_given_up(self, name: str, place: Path, caplog: pytest.LogCaptureFixture) -> None:
        with local(place, fakes.uses_gpu, name) as backend:
            begin(backend, job("proof"))
            run_on(backend, 0.3)
            assert stopped(backend, "proof")
            log = place / "study" / "logs" / "silent.log"
            for earlier in range(4):
                backend.start(job("silent"), GPU)
                wait_for(lambda: log.exists() and log.read_text().count("connected") > earlier)  # noqa: B023
                assert run_on(backend, 0.1) == []
                os.kill(daemon_pid(place), signal.SIGKILL)
                (end,) = events_until_ended(backend, ["silent"])["silent"]
                assert isinstance(end, Ended)
                assert end.outcome is Outcome.LOST
            if name == "mps":
                with pytest.raises(
                    BackendError, match=r"cuda:0 cannot be shared by MPS: MPS has failed 4 times in a row"
                ):
                    backend.start(job("job"), GPU)
            else:
                assert begin(backend, job("job"))["set"] == 1
                assert "cuda:0 share it without MPS: MPS has failed 4 times in a row" in caplog.text
