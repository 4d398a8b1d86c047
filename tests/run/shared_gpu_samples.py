"""A local back end on GPUs that do not exist, with a fake of NVIDIA's control program."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mps_fakes as fakes
import psutil

from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.job import Job
from shoal.run import Ended, Event, Local, Outcome, Reported, WorkerContext
from shoal.run.gpu_sharing import GpuSharing
from shoal.run.mps import MpsDaemon
from shoal.run.mps_clients import SharedGpu
from shoal.testing.backends import Script, events_until_ended, scripted, scripted_job

GIB = 2**30
GPU = Device("cuda:0", "A100", 80 * GIB, uuid="GPU-0")
OTHER_GPU = Device("cuda:1", "A100", 80 * GIB, uuid="GPU-1")
MIG = Device("mig:0", "A100 MIG 1g.10gb", 10 * GIB, uuid="MIG-0")
CPU = Device("cpu:0", "cpu", 2 * GIB)


@contextmanager
def local(place: Path, script: Script, name: str = "mps", command: str | None = None) -> Iterator[Local]:
    """A back end whose clock runs two hundred times as fast."""

    def daemon(uuid: str) -> MpsDaemon:
        return MpsDaemon(uuid, place / uuid, command=command or str(place / "nvidia-cuda-mps-control"))

    def shared_gpu(device: str, each: MpsDaemon) -> SharedGpu:
        return SharedGpu(device, each, device_file=os.environ[fakes.DEVICE_FILE])

    def make(worker_context: WorkerContext) -> Local:
        return Local(
            worker_context, GpuSharing(name, daemon, lambda: 200 * time.monotonic(), shared_gpu, check_interval=0.02)
        )

    with scripted(make, place / "study", script) as backend:
        assert isinstance(backend, Local)
        yield backend


def job(name: str, compute: float = 0.25, memory: int = GIB) -> Job:
    """A job in company, limited to its demand."""
    return replace(scripted_job(name), demand=Demand(compute, memory, 1.0, 60.0), compute_limit=compute)


def program(name: str, memory: int = GIB) -> Job:
    """A program in company, limited to so many bytes."""
    each = job(name)
    arrays = tuple(replace(array, key=replace(array.key, opaque=True)) for array in each.arrays)
    return replace(each, arrays=arrays, memory_limit=memory)


def seen(event: Event) -> dict[str, float]:
    assert isinstance(event, Reported), event
    return dict(event.reports[0].metrics)


def next_event(backend: Local) -> Event:
    (event,) = backend.poll(60.0)
    return event


def begin(backend: Local, each: Job, device: Device = GPU) -> dict[str, float]:
    """Start a job, and what its first report says of its process."""
    backend.start(each, device)
    return seen(next_event(backend))


def stopped(backend: Local, *names: str) -> bool:
    for name in names:
        backend.stop(name)
    ends = events_until_ended(backend, names)
    return all(ends[name] == [Ended(name, Outcome.STOPPED)] for name in names)


def run_on(backend: Local, seconds: float = 0.4) -> list[Event]:
    """What happens meanwhile; on the clock of the back end it is more than a minute."""
    deadline = time.monotonic() + seconds
    events: list[Event] = []
    while time.monotonic() < deadline:
        events += backend.poll(0.05)
    return events


def daemon_pid(place: Path, uuid: str = "GPU-0") -> int:
    return int((place / uuid / "pipe" / "nvidia-cuda-mps-control.pid").read_text())


def servers(place: Path, uuid: str = "GPU-0") -> list[int]:
    return [child.pid for child in psutil.Process(daemon_pid(place, uuid)).children()]
