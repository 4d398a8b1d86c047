"""Runs the jobs of a team whose helper is on a machine with another address, which is one of the loopback's here."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.host.machine import own_addresses
from shoal.run.base import Event, WorkerContext
from shoal.task import Task
from shoal.train.control import JobControl
from shoal.train.run import run as run_job

HELPER_HOST = "127.0.0.2"


class Linear(Task):
    """A linear regression."""

    def data(self, config: Any) -> tuple[Any, Any]:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return (TensorDataset(x, x[:, :1]),) * 2

    def model(self, config: Any) -> nn.Module:
        return nn.Linear(4, 1)

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    def batch_size(self, config: Any) -> int:
        return 16

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    assert worker_context.host == own_addresses()[0], "an agent gives its workers the address of its machine"
    if job.purpose is Purpose.ASSIST:
        worker_context = replace(worker_context, host=HELPER_HOST)
    yield from run_job(job, device, worker_context, control)
