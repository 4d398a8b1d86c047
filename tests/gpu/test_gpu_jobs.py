"""Worker processes on a real GPU: bound to it, by MPS and without; caps; death of server and daemon; faults."""

import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gpu_jobs as jobs
import psutil
import pytest
import torch

from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.job import Job
from shoal.host.discover import discover
from shoal.host.processes import is_alive
from shoal.run import Ended, Event, Local, Outcome, Reported, WorkerContext
from shoal.run.gpu_sharing import GpuSharing
from shoal.run.mps import COMMAND, MpsDaemon
from shoal.testing.backends import Script, events_until_ended, scripted, scripted_job

pytestmark = pytest.mark.gpu

by_mps = pytest.mark.skipif(shutil.which(COMMAND) is None, reason=f"needs {COMMAND} of NVIDIA's driver, not on PATH")
GIB = 2**30
PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def gpu() -> Device:
    """The first GPU; a whole one."""
    device = next(device for _, device in discover("auto") if device.healthy)
    if not device.uuid.startswith("GPU-"):
        pytest.skip(f"{device.name} is an instance of a GPU, which MPS does not share")
    return device


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, for the sockets of a daemon."""
    place = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def local(place: Path, script: Script, name: str = "mps") -> Iterator[Local]:
    def make(worker_context: WorkerContext) -> Local:
        return Local(worker_context, GpuSharing(name, lambda uuid: MpsDaemon(uuid, place / "gpu"), check_interval=0.1))

    with scripted(make, place / "study", script) as backend:
        assert isinstance(backend, Local)
        yield backend


def job(name: str, compute: float = 0.25, memory: int = GIB) -> Job:
    """A job in company, limited to its demand."""
    return replace(scripted_job(name), demand=Demand(compute, memory, 1.0, 60.0), compute_limit=compute)


def program(name: str, memory: int) -> Job:
    """A program in company, limited to so many bytes."""
    each = job(name)
    arrays = tuple(replace(array, key=replace(array.key, opaque=True)) for array in each.arrays)
    return replace(each, arrays=arrays, memory_limit=memory)


def next_event(backend: Local) -> Event:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for event in backend.poll(1.0):
            return event
    raise AssertionError(f"no event in {PATIENCE_SECONDS:g} s")


def begin(backend: Local, each: Job, device: Device) -> dict[str, float]:
    backend.start(each, device)
    event = next_event(backend)
    assert isinstance(event, Reported), event
    return dict(event.reports[0].metrics)


def ended(backend: Local, *names: str) -> dict[str, Ended]:
    ends = {name: events[-1] for name, events in events_until_ended(backend, names).items()}
    assert all(isinstance(end, Ended) for end in ends.values())
    return ends  # type: ignore[return-value]


def daemon(place: Path, gpu: Device) -> MpsDaemon:
    """A view of the daemon of the back end; it holds no lock, so that it ends nothing."""
    return MpsDaemon(gpu.uuid, place / "gpu")


def test_without_mps_a_process_sees_its_gpu_alone_and_is_used_again(gpu: Device, place: Path) -> None:
    with local(place, jobs.computes, "plain") as backend:
        one = begin(backend, job("one"), gpu)
        assert one["devices"] == 1
        assert one["total"] == 512.0**3
        backend.stop("one")
        assert ended(backend, "one")["one"].outcome is Outcome.STOPPED
        assert begin(backend, job("short"), gpu)["pid"] == one["pid"]
        assert ended(backend, "short")["short"].outcome is Outcome.FINISHED


def test_two_jobs_run_side_by_side_without_mps(gpu: Device, place: Path) -> None:
    with local(place, jobs.computes, "plain") as backend:
        pids = {begin(backend, job(name), gpu)["pid"] for name in ("one", "two")}
        assert len(pids) == 2
        backend.stop("one")
        backend.stop("two")
        assert {end.outcome for end in ended(backend, "one", "two").values()} == {Outcome.STOPPED}


def test_a_job_that_breaks_its_context_fails_and_the_next_has_a_new_process(gpu: Device, place: Path) -> None:
    with local(place, jobs.breaks_the_device, "plain") as backend:
        broken = begin(backend, job("breaks"), gpu)
        end = ended(backend, "breaks")["breaks"]
        assert end.outcome in (Outcome.RAISED, Outcome.CRASHED)
        after = begin(backend, job("short"), gpu)
        assert after["pid"] != broken["pid"]
        assert ended(backend, "short")["short"].outcome is Outcome.FINISHED


def test_memory_runs_out_without_mps(gpu: Device, place: Path) -> None:
    held = torch.empty(max(0, torch.cuda.mem_get_info(0)[0] - 3 * GIB), dtype=torch.uint8, device="cuda:0")
    with local(place, jobs.allocates, "plain") as backend:
        found = begin(backend, job("fills"), gpu)
        end = ended(backend, "fills")["fills"]
        assert (found["full"], end.outcome) == (1.0, Outcome.OUT_OF_MEMORY)
    del held
    torch.cuda.empty_cache()


@by_mps
def test_by_mps_two_jobs_are_clients_of_one_server_with_a_share_each(gpu: Device, place: Path) -> None:
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    with local(place, jobs.computes) as backend:
        quarter = begin(backend, job("quarter"), gpu)
        half = begin(backend, job("half", compute=0.5), gpu)
        view = daemon(place, gpu)
        assert view.alive()
        ((_, clients),) = view.clients().items()
        assert {int(quarter["pid"]), int(half["pid"])} <= clients
        assert quarter["processors"] <= math.ceil(0.25 * whole) + 2
        assert quarter["processors"] < half["processors"] <= math.ceil(0.5 * whole) + 2
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            assert backend.poll(0.5) == [], "the check of the clients ends none of them"
        backend.stop("quarter")
        backend.stop("half")
        assert {end.outcome for end in ended(backend, "quarter", "half").values()} == {Outcome.STOPPED}
    assert not daemon(place, gpu).alive(), "the last study ends the daemon"


@by_mps
def test_by_mps_a_program_has_no_more_memory_than_its_limit(gpu: Device, place: Path) -> None:
    with local(place, jobs.allocates) as backend:
        found = begin(backend, program("fills", GIB), gpu)
        assert found["full"] == 1.0
        assert 512 <= found["megabytes"] <= 1536, "1 GiB and 512 MiB for the context"
        assert ended(backend, "fills")["fills"].outcome is Outcome.OUT_OF_MEMORY


@by_mps
@pytest.mark.parametrize("part", ["server", "daemon"])
def test_when_mps_dies_its_jobs_are_lost_and_the_next_has_a_new_one(part: str, gpu: Device, place: Path) -> None:
    with local(place, jobs.computes) as backend:
        one = begin(backend, job("one"), gpu)
        view = daemon(place, gpu)
        (server,) = view.servers()
        victim = server if part == "server" else int((place / "gpu" / "pipe" / f"{COMMAND}.pid").read_text())
        time.sleep(2.0)  # the check of the client has seen its server
        os.kill(victim, signal.SIGKILL)
        end = ended(backend, "one")["one"]
        assert end.outcome in (Outcome.LOST, Outcome.CRASHED, Outcome.RAISED), end
        two = begin(backend, job("two"), gpu)
        assert two["pid"] != one["pid"]
        assert view.alive()
        (new,) = view.servers()
        assert new != server
        backend.stop("two")
        assert ended(backend, "two")["two"].outcome is Outcome.STOPPED
    assert not is_alive(new)


@by_mps
def test_a_daemon_starts_is_listed_and_ends(gpu: Device, place: Path) -> None:
    started = MpsDaemon(gpu.uuid, place / "gpu")
    started.start()
    try:
        assert started.alive()
        assert started.servers() == [], "the first client brings the server"
        assert started.clients() == {}
        pid = int((place / "gpu" / "pipe" / f"{COMMAND}.pid").read_text())
        assert COMMAND in " ".join(psutil.Process(pid).cmdline())
    finally:
        started.stop()
    assert not started.alive()
    assert not is_alive(pid)
