"""What the jobs of test_local.py do; apart from the tests, so that workers import no pytest."""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run.base import Event, Reported
from shoal.train.control import JobControl


def measured(job: Job, **metrics: float) -> Reported:
    return Reported(job.id, (Report(0, 1, metrics),))


def pids(job: Job) -> Reported:
    return measured(job, worker=os.getpid(), server=os.getppid())


def returns(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield pids(job)
    if job.id == "bad":
        raise ValueError("bad job")


def imports(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield measured(job, value=importlib.import_module("whereabouts").VALUE)


def inherits(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield measured(job, umask=os.umask(0), cores=len(os.sched_getaffinity(0)))


def wait_for_stop(control: JobControl) -> None:
    control.changes()
    while not control.stopping():
        control.wait(600.0)
        control.changes()


def waits(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield pids(job)
    wait_for_stop(control)


def reports_when_stopped(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield from waits(job, device, control)
    yield pids(job)


def waits_with_child(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        yield measured(job, worker=os.getpid(), server=os.getppid(), child=child.pid)
        child.wait()


def holds_the_interpreter(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield pids(job)
    ctypes.PyDLL(None).pause()  # unlike CDLL, keeps the GIL: no other thread of the worker runs


def kills_its_server(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield pids(job)
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def exits(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield pids(job)
    os._exit(3)


def reads_address_zero(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield pids(job)
    ctypes.string_at(0)


def reports_and_dies(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    for number in range(50):  # as many as a pipe holds
        yield measured(job, number=number)
    os.write(1, f"{os.getpid()}\n".encode())
    os._exit(1)


def prints(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    print(f"{job.id}: from print")
    print(f"{job.id}: from stderr", file=sys.stderr)
    os.write(1, f"{job.id}: from C\n".encode())
    subprocess.run(["echo", f"{job.id}: from a child"], check=True)
    yield measured(job)


def user_code() -> None:
    raise ValueError("no such column")


def raises_in_user_code(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield measured(job)
    user_code()


def looks_around(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield measured(job, torch="torch" in sys.modules, main_has_file=hasattr(sys.modules["__main__"], "__file__"))
