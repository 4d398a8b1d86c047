"""Sharing of GPUs by jobs, with or without MPS, and the environment variables that bind a process to its GPU."""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError, MpsError
from shoal.core.job import Job, Purpose
from shoal.core.names import nearest_name_hint
from shoal.run.base import Ended, Event, Outcome, Profiled, RelativeTimeMeasured, Reported
from shoal.run.mps import COMMAND, MpsDaemon
from shoal.run.mps_clients import CHECK_SECONDS, RECHECK_SECONDS, MpsClient, SharedGpu

__all__ = ["SHARINGS", "Binding", "GpuSharing", "check_sharing", "pinned_limit"]

SHARINGS: dict[str, str] = {
    "auto": "by MPS if that can be started, else plain",
    "mps": "by MPS, with a share for each job; an error if that is impossible",
    "plain": "side by side, each with all of the GPU in turn",
}
"""Methods by which jobs share one GPU."""

CONTEXT_BYTES = 512 * 2**20
"""Allowance for the CUDA context of a process, 300 to 500 MB, which a demand may leave out."""

_STEP_BYTES = 256 * 2**20
"""Unit of limits of memory, so that programs of similar size can use the same process."""

_MAX_FAILURES = 3
"""Limit of failures of MPS in a row without a job that reports in between."""

_log = logging.getLogger("shoal.run")


def check_sharing(name: object, cluster: Cluster, *, processes: bool) -> None:
    """Check the `sharing` of a study before the study begins; `processes`: every job has a process of its own."""
    if not isinstance(name, str) or name not in SHARINGS:
        hint, known = nearest_name_hint(name, SHARINGS), ", ".join(map(repr, SHARINGS))
        raise BackendError(f"unknown `sharing` {name!r}{hint}, known are {known}")
    if name != "mps":
        return
    if not processes:
        raise BackendError("sharing='mps' needs a process for each job; use backend='local', or sharing='auto'")
    for _, device in cluster:
        if not device.supports_mps:
            raise BackendError(
                f"sharing='mps' is for whole NVIDIA GPUs, and {device.name} ({device.kind}) is not one; "
                "use other devices, or sharing='auto'"
            )
    if not any(device.node for _, device in cluster) and shutil.which(COMMAND) is None:
        raise BackendError(
            f"sharing='mps' needs {COMMAND!r}, which is not on PATH; it comes with NVIDIA's driver for Linux. Install "
            "it, or use sharing='plain'"
        )


@dataclass(frozen=True)
class Binding:
    """Environment variables that bind a worker process to its device until the process ends.

    CUDA reads them once, at its first call, and MPS takes the limits when a client connects. So a process takes another
    job only if that job has the same binding.
    """

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_client(self) -> bool:
        """Whether the process is to be a client of an MPS daemon."""
        return "CUDA_MPS_PIPE_DIRECTORY" in self.variables

    def apply(self) -> None:
        """Set the variables in this process, before its first use of CUDA."""
        os.environ.update(self.variables)


class GpuSharing:
    """Binds the jobs of a back end to their devices, and monitors the clients of MPS.

    The daemon of a GPU starts with the first job on it and ends with `close`. After its death it starts again with the
    next job.

    Args:
        name: Name of the setting, a key of `SHARINGS`.
        daemon: Maker of the daemon of a GPU, from the UUID of the GPU.
    """

    def __init__(
        self,
        name: str = "auto",
        daemon: Callable[[str], MpsDaemon] = MpsDaemon,
        clock: Callable[[], float] = time.monotonic,
        shared_gpu: Callable[[str, MpsDaemon], SharedGpu] = SharedGpu,
        check_interval: float = CHECK_SECONDS,
    ) -> None:
        self.name = name
        self._daemon = daemon
        self._clock = clock
        self._shared_gpu = shared_gpu
        self._check_interval = check_interval
        self._gpus: dict[str, SharedGpu] = {}
        self._without_mps: set[str] = set()  # GPUs on which MPS failed

    @property
    def check_interval(self) -> float:
        """Longest time between two calls of `check`, in seconds; inf if no GPU is shared by MPS."""
        return self._check_interval if self._gpus else float("inf")

    def can_limit_compute(self, device: Device) -> bool:
        """Return whether MPS limits processes on a device to a part of its compute: not once it has failed."""
        if self.name == "plain" or not device.supports_mps or device.name in self._without_mps:
            return False
        return self.name == "mps" or device.name in self._gpus or shutil.which(COMMAND) is not None

    def bind(self, job: Job, device: Device) -> Binding:
        """The binding of a job to its device, with a running daemon if needed; "mps" raises BackendError without it."""
        if self.name == "plain" or not device.supports_mps or device.name in self._without_mps:
            return _plain_binding(device)
        try:
            gpu = self._start_mps(device)
        except MpsError as error:
            self._fall_back_to_plain(device.name, str(error), error)
            return _plain_binding(device)
        return _mps_binding(device, gpu.daemon, job)

    def client(self, binding: Binding, device: Device) -> MpsClient | None:
        """Return the client state of a new process; None without MPS."""
        return MpsClient(device.name) if binding.is_client else None

    def begin(self, client: MpsClient | None, job: Job) -> None:
        """Note the start of a job in the process of a client."""
        if client is not None and not client.busy and job.purpose is not Purpose.SIGNATURE:
            client.busy = True
            client.next_check = self._clock() + RECHECK_SECONDS

    def on_event(self, client: MpsClient | None, event: Event) -> None:
        """Note an event of a job in the process of a client."""
        gpu = self._gpus.get(client.device) if client is not None else None
        if client is not None and gpu is not None and isinstance(event, Reported | Profiled | RelativeTimeMeasured):
            gpu.on_event(client)

    def reclassified(self, client: MpsClient | None, end: Ended) -> Ended:
        """Return the end of a job; an exception of CUDA about MPS becomes `LOST`, as user code did not cause it."""
        gpu = self._gpus.get(client.device) if client is not None else None
        if gpu is None or end.outcome is not Outcome.RAISED or not _is_mps_error(end.message):
            return end
        gpu.record_failure(self._clock())
        message = f"MPS of {gpu.device} failed; log: {gpu.daemon.log}\n{end.message}"
        return replace(end, outcome=Outcome.LOST, message=message)

    def check(self, mps_clients: Iterable[MpsClient]) -> dict[MpsClient, str]:
        """Return the clients whose processes must end, with the reasons."""
        if not self._gpus:
            return {}
        now = self._clock()
        clients = list(mps_clients)
        reasons: dict[MpsClient, str] = {}
        for name, gpu in self._gpus.items():
            reasons |= gpu.check([client for client in clients if client.device == name], now)
        return reasons

    def close(self) -> None:
        """End the daemons, after their clients. May be called twice."""
        while self._gpus:
            self._gpus.popitem()[1].daemon.stop()

    def _start_mps(self, device: Device) -> SharedGpu:
        gpu = self._gpus.get(device.name)
        if gpu is None:
            gpu = self._gpus[device.name] = self._shared_gpu(device.name, self._daemon(device.uuid))
        elif gpu.failures > _MAX_FAILURES or (gpu.failures and not gpu.has_worked and self.name == "auto"):
            # If no job has ever worked with MPS, the next job would fail, too.
            raise MpsError(f"MPS has failed {gpu.failures} times in a row; log: {gpu.daemon.log}")
        gpu.start()
        return gpu

    def _fall_back_to_plain(self, device: str, reason: str, cause: MpsError) -> None:
        if self.name == "mps":
            raise BackendError(f"{device} cannot be shared by MPS: {reason}") from cause
        _log.warning("jobs on %s share it without MPS: %s", device, reason)
        self._without_mps.add(device)


def _plain_binding(device: Device) -> Binding:
    """The binding to a device without MPS; a GPU is the only visible one, as "cuda:0"."""
    return Binding({"CUDA_VISIBLE_DEVICES": device.uuid} if device.uuid else {})


def _mps_binding(device: Device, daemon: MpsDaemon, job: Job) -> Binding:
    """Return the binding to a GPU, with the limit of compute of the job, and of a program that of memory.

    Jobs that train limit the memory of torch themselves, so that one process can take jobs with other limits.
    """
    share = 1.0 if job.compute_limit is None else job.compute_limit
    pinned = job.memory_limit and any(array.key.opaque for array in job.arrays)
    return Binding(daemon.environment(share, pinned_limit(job.memory_limit, device) if pinned else None))


def pinned_limit(memory: int, device: Device) -> int:
    """Return the bytes of a GPU that the process of a program may use, including its CUDA context."""
    wanted = math.ceil((memory + CONTEXT_BYTES) / _STEP_BYTES) * _STEP_BYTES
    return min(device.memory, wanted)


def _is_mps_error(message: str) -> bool:
    """Return whether a message is a CUDA error about MPS, numbers 805 to 810 of `cudaError_t`."""
    return "CUDA error" in message and "MPS" in message
