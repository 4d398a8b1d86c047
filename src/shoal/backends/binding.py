"""What ties a worker process to its device: environment variables that CUDA reads when it is first used."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.cluster.mps import MpsDaemon
from shoal.cluster.mps_limits import pinned_limit
from shoal.core.device import Device
from shoal.core.job import Job

__all__ = ["Binding", "alone_on", "client_on"]


@dataclass(frozen=True)
class Binding:
    """The variables of a process, which are the same for all of its life.

    CUDA reads them once, at its first call, and MPS takes the limits when a client connects. So a process does another
    job only if that has the same binding.

    Args:
        variables: names to values; of a CPU slot none.
    """

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_client(self) -> bool:
        """Whether the process is to be a client of an MPS daemon."""
        return "CUDA_MPS_PIPE_DIRECTORY" in self.variables

    def apply(self) -> None:
        """Put the variables into force in this process, before anything in it uses CUDA."""
        os.environ.update(self.variables)


def alone_on(device: Device) -> Binding:
    """To a device as if the process had it to itself; a GPU is the only one it sees, as "cuda:0"."""
    return Binding({"CUDA_VISIBLE_DEVICES": device.uuid} if device.uuid else {})


def client_on(device: Device, daemon: MpsDaemon, job: Job) -> Binding:
    """To a share of a GPU: what the job was promised of it, all where nothing is known of the job."""
    if job.demand is None:
        return Binding(daemon.environment())
    share = min(1.0, job.demand.compute / device.compute) if device.compute else 1.0
    limit = pinned_limit(job.demand, device) if job.demand.memory else None  # 0 says that nothing is known
    return Binding(daemon.environment(share, limit))
