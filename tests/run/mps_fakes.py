"""A fake of NVIDIA's control program, and jobs that use a GPU as CUDA would; apart from the tests, for the workers."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from local_scripts import wait_for_stop

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run.base import Event, Reported, SignaturesFound
from shoal.run.mps import COMMAND
from shoal.train.control import JobControl

DEVICE_FILE = "FAKE_NVIDIA_UVM"
"""The variable that names the file which stands for /dev/nvidia-uvm."""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)


def install(directory: Path) -> str:
    """The path of a new executable in a directory."""
    path = directory / COMMAND
    source = Path(__file__).with_name("fake_mps_control.py").read_text()
    path.write_text(f"#!{sys.executable} -IS\n{source}")
    path.chmod(0o755)
    return str(path)


def connect(pid: int, pipe: str) -> bool:
    """Become a client; without a daemon CUDA continues without MPS, and so does this."""
    with socket.socket(socket.AF_UNIX) as control:
        try:
            control.connect(f"{pipe}/control")
        except OSError:
            return False
        control.sendall(f"client {pid}\n".encode())
        return control.makefile().read() == "connected\n"


def shown(job: Job) -> Reported:
    """What the process sees of its binding, as text that sorts as the variables do."""
    metrics = {"pid": float(os.getpid()), "set": float(sum(name in os.environ for name in VARIABLES))}
    if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ:
        metrics["percentage"] = float(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
    if (limit := os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")) is not None:
        assert limit[:2] == "0="
        assert limit[-1] == "M"
        metrics["megabytes"] = float(limit[2:-1])
    return Reported(job.id, (Report(0, 1, metrics),))


def uses_gpu(job: Job, device: Device, orders: JobControl) -> Iterator[Event]:
    """A job that uses CUDA, and is a client where the environment says so."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == device.uuid
    with open(os.environ[DEVICE_FILE], "w"):
        if (pipe := os.environ.get("CUDA_MPS_PIPE_DIRECTORY")) is not None and connect(os.getpid(), pipe):
            print("connected", flush=True)
        if not job.id.startswith("silent"):
            yield shown(job)
        if not job.id.startswith("short"):
            wait_for_stop(orders)


def lets_a_child_use_it(job: Job, device: Device, orders: JobControl) -> Iterator[Event]:
    """A job whose command uses CUDA."""
    with (
        open(os.environ[DEVICE_FILE], "w") as file,
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[file.fileno()]) as child,
    ):
        assert connect(child.pid, os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        yield shown(job)
        wait_for_stop(orders)
        child.kill()


def escapes(job: Job, device: Device, orders: JobControl) -> Iterator[Event]:
    """A job that uses CUDA past the daemon, but for the first, if that is called so."""
    with open(os.environ[DEVICE_FILE], "w"):
        if job.id.startswith("client"):
            connect(os.getpid(), os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        yield shown(job)
        wait_for_stop(orders)


def stays_off(job: Job, device: Device, orders: JobControl) -> Iterator[Event]:
    """A job that leaves the GPU alone."""
    yield shown(job)
    wait_for_stop(orders)


def blames_mps(job: Job, device: Device, orders: JobControl) -> Iterator[Event]:
    """A job that CUDA tells of a fault of MPS, but for those without it."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        raise RuntimeError("CUDA error: MPS server is not ready to accept new MPS client requests")
    yield shown(job)


def signature_job(job: Job, device: Device, orders: JobControl) -> Iterator[Event]:
    """A job that opens the GPU, without a context on it."""
    with open(os.environ[DEVICE_FILE], "w"):
        yield SignaturesFound(job.id, {})
        wait_for_stop(orders)
