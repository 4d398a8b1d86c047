"""How jobs share a GPU: as clients of its MPS daemon, or plainly; the environment variables that bind a process."""

import difflib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.backends.base import Ended, Event, Outcome, PackSpeedMeasured, Profiled, Reported
from shoal.backends.mps_clients import AGAIN_SECONDS, LOOK_SECONDS, MpsClient, SharedGpu
from shoal.cluster.mps import COMMAND, MpsDaemon
from shoal.cluster.mps_limits import can_share, pinned_limit
from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError, MpsError
from shoal.core.job import Job, Purpose

__all__ = ["SHARINGS", "Binding", "GpuSharing", "check_sharing"]


SHARINGS: dict[str, str] = {
    "auto": "by MPS where that can be started, else plain",
    "mps": "by MPS, with a share and a memory limit for each job; an error where that cannot be",
    "plain": "side by side, each with all of the GPU in turn",
}
"""How jobs on one GPU share it, by name."""


_MOST_FAILURES = 3
"""So often in a row a daemon is begun anew without a job that reports in between."""


_log = logging.getLogger("shoal.backends")


def check_sharing(name: object, cluster: Cluster, *, processes: bool) -> None:
    """Look at a setting before there is anything to lose.

    Args:
        name: of the setting.
        cluster: the devices of the study.
        processes: whether the back end gives every job a process of its own.

    Raises:
        BackendError: there is no such setting, or it cannot be had there.
    """
    if not isinstance(name, str) or name not in SHARINGS:
        nearest = difflib.get_close_matches(str(name), SHARINGS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise BackendError(f"unknown `sharing` {name!r}, known are {', '.join(map(repr, SHARINGS))}{hint}")
    if name != "mps":
        return
    if not processes:
        raise BackendError("sharing='mps' needs a process for each job; use backend='local', or sharing='auto'")
    for _, device in cluster:
        if not can_share(device):
            raise BackendError(
                f"sharing='mps' is for whole NVIDIA GPUs, and {device.name} ({device.kind}) is none; "
                "use other devices, or sharing='auto'"
            )
    if shutil.which(COMMAND) is None:
        raise BackendError(
            f"sharing='mps' needs {COMMAND!r}, which is not on PATH; it comes with NVIDIA's driver for Linux. Install "
            "it, or use sharing='plain'"
        )


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


class GpuSharing:
    """Binds the jobs of a back end to their devices, and keeps an eye on those that share one by MPS.

    A daemon is begun for the first job on its GPU and ended by `close`. One that dies is begun anew for the next job.

    Args:
        name: of the setting.
        daemon: makes the daemon of a GPU from its UUID.
        clock: seconds that only go forward.
        shared_gpu: makes what watches one GPU.
        pause: seconds of a wait for events after which `check` is to be called again.
    """

    def __init__(
        self,
        name: str = "auto",
        daemon: Callable[[str], MpsDaemon] = MpsDaemon,
        clock: Callable[[], float] = time.monotonic,
        shared_gpu: Callable[[str, MpsDaemon], SharedGpu] = SharedGpu,
        pause: float = LOOK_SECONDS,
    ) -> None:
        self.name = name
        self._daemon = daemon
        self._clock = clock
        self._shared_gpu = shared_gpu
        self._pause = pause
        self._gpus: dict[str, SharedGpu] = {}
        self._plain: set[str] = set()  # GPUs that could not be shared by MPS

    @property
    def pause(self) -> float:
        """Longest time between two calls of `check`, in seconds."""
        return self._pause if self._gpus else float("inf")

    def bind(self, job: Job, device: Device) -> Binding:
        """What ties the process of a job to its device; starts the daemon of a GPU that is to have one.

        Raises:
            BackendError: it is to have one, and cannot.
        """
        if self.name == "plain" or not can_share(device) or device.name in self._plain:
            return _alone_on(device)
        try:
            gpu = self._ready(device)
        except MpsError as error:
            self._give_up(device.name, str(error), error)
            return _alone_on(device)
        return _client_on(device, gpu.daemon, job)

    def client(self, binding: Binding, device: Device) -> MpsClient | None:
        """To be kept with a new process, if it is to be a client."""
        return MpsClient(device.name) if binding.is_client else None

    def begin(self, client: MpsClient | None, job: Job) -> None:
        """Note what that process is given to do."""
        if client is not None and not client.busy and job.purpose is not Purpose.SURVEY:
            client.busy = True
            client.next_look = self._clock() + AGAIN_SECONDS

    def on_event(self, client: MpsClient | None, event: Event) -> None:
        """Note what a job in that process says."""
        gpu = self._gpus.get(client.device) if client is not None else None
        if client is not None and gpu is not None and isinstance(event, Reported | Profiled | PackSpeedMeasured):
            gpu.on_event(client)

    def judged(self, client: MpsClient | None, end: Ended) -> Ended:
        """The failure of a job in that process; what CUDA says of MPS is not the fault of the user's code."""
        gpu = self._gpus.get(client.device) if client is not None else None
        if gpu is None or end.outcome is not Outcome.RAISED or not _blames_mps(end.message):
            return end
        gpu.fail(self._clock())
        message = f"MPS of {gpu.device} failed; log: {gpu.daemon.log}\n{end.message}"
        return replace(end, outcome=Outcome.LOST, message=message)

    def check(self, mps_clients: Iterable[MpsClient]) -> dict[MpsClient, str]:
        """The processes that have to end, and why."""
        if not self._gpus:
            return {}
        now = self._clock()
        everyone = list(mps_clients)
        reasons: dict[MpsClient, str] = {}
        for name, gpu in self._gpus.items():
            reasons |= gpu.check([client for client in everyone if client.device == name], now)
        return reasons

    def close(self) -> None:
        """End the daemons; their clients are gone by now. May be called twice."""
        while self._gpus:
            self._gpus.popitem()[1].daemon.stop()

    def _ready(self, device: Device) -> SharedGpu:
        """The GPU with a daemon that runs.

        Raises:
            MpsError: there cannot be one, or it does not stay, or its clients do not reach it.
        """
        gpu = self._gpus.get(device.name)
        if gpu is None:
            gpu = self._gpus[device.name] = self._shared_gpu(device.name, self._daemon(device.uuid))
        elif gpu.failures > _MOST_FAILURES or (gpu.failures and not gpu.proven and self.name == "auto"):
            # Where no job has ever got on with MPS, the next would be lost for nothing.
            raise MpsError(f"MPS has failed {gpu.failures} times in a row; log: {gpu.daemon.log}")
        gpu.start()
        return gpu

    def _give_up(self, device: str, reason: str, cause: MpsError) -> None:
        """Go on without MPS on a GPU.

        Raises:
            BackendError: that is not allowed.
        """
        if self.name == "mps":
            raise BackendError(f"{device} cannot be shared by MPS: {reason}") from cause
        _log.warning("jobs on %s share it without MPS: %s", device, reason)
        self._plain.add(device)


def _alone_on(device: Device) -> Binding:
    """To a device as if the process had it to itself; a GPU is the only one it sees, as "cuda:0"."""
    return Binding({"CUDA_VISIBLE_DEVICES": device.uuid} if device.uuid else {})


def _client_on(device: Device, daemon: MpsDaemon, job: Job) -> Binding:
    """To a share of a GPU: what the job was promised of it, all where nothing is known of the job."""
    if job.demand is None:
        return Binding(daemon.environment())
    share = min(1.0, job.demand.compute / device.compute) if device.compute else 1.0
    limit = pinned_limit(job.demand, device) if job.demand.memory else None  # 0 says that nothing is known
    return Binding(daemon.environment(share, limit))


def _blames_mps(message: str) -> bool:
    """Whether an error is one of CUDA's own about MPS, numbers 805 to 810 of `cudaError_t`."""
    return "CUDA error" in message and "MPS" in message
