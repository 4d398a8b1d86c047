"""A runner that computes with what its server has imported, in threads that only the worker may start."""

from collections.abc import Iterator

import numpy as np
import torch

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run.base import Event, Reported, WorkerContext
from shoal.train.control import JobControl


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    torch.set_num_threads(2)
    a = torch.ones(300, 300, requires_grad=True)
    (a @ a).sum().backward()
    assert a.grad is not None
    b = np.ones((300, 300))
    metrics = {
        "torch": float(a.grad[0, 0]),
        "numpy": float((b @ b)[0, 0]),
        "cuda_initialized": float(torch.cuda.is_initialized()),
    }
    yield Reported(job.id, (Report(0, 1, metrics),))
