"""Jobs that use a real GPU, for a local back end; apart from the tests, since workers import this module."""

import os
import time
from collections.abc import Iterator

import torch

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run.base import Event, Reported
from shoal.train.control import JobControl

MIB = 2**20


def shown(job: Job, **more: float) -> Reported:
    """What the process has of the GPU."""
    torch.cuda.synchronize()
    properties = torch.cuda.get_device_properties(0)
    visible = {"pid": os.getpid(), "devices": torch.cuda.device_count(), "processors": properties.multi_processor_count}
    return Reported(job.id, (Report(0, 1, {name: float(value) for name, value in (visible | more).items()}),))


def computes(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    """Multiply matrices until told to stop, but for a job that is called "short"."""
    x = torch.ones(512, 512, device="cuda:0")
    total = float((x @ x).sum())
    yield shown(job, total=total)
    while not (control.stopping() or job.id.startswith("short")):
        assert float((x @ x).sum()) == total
        time.sleep(0.005)


def allocates(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    """Take memory in steps of 64 MiB until there is no more of it, and report how much there was."""
    held: list[torch.Tensor] = []
    try:
        while len(held) < 64:
            held.append(torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda:0"))
    except torch.OutOfMemoryError:
        yield shown(job, megabytes=64.0 * len(held), full=1.0)
        raise
    yield shown(job, megabytes=64.0 * len(held), full=0.0)


def breaks_the_device(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    """Leave the CUDA context of the process unusable, as a fault of a kernel does; a job called "short" does not."""
    x = torch.zeros(4, device="cuda:0")
    yield shown(job)
    if not job.id.startswith("short"):
        x[torch.tensor([1 << 30], device="cuda:0")] += 1
        torch.cuda.synchronize()
