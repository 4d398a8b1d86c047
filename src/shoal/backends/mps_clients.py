"""Monitors the worker processes that share a GPU by MPS: whether each is a client, and whether its daemon is alive."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.mps import MpsDaemon
from shoal.cluster.processes import is_alive, process_tree
from shoal.core.errors import MpsError

__all__ = ["AGAIN_SECONDS", "LOOK_SECONDS", "MpsClient", "SharedGpu"]

LOOK_SECONDS = 1.0
"""Time between two checks of the daemon and its servers."""

AGAIN_SECONDS = 10.0
"""Time between two checks of a process that has reported nothing and is not among the clients."""

_MOST_MISSES = 3
"""Number of checks at which such a process may use the GPU without being a client, as it may be connecting."""

_INCIDENT_SECONDS = 10.0
"""Failures within this time count as one: with a server all its clients fail."""

_DEVICE_FILE = "/dev/nvidia-uvm"
"""Open in every process that has initialised CUDA, with or without MPS."""


@dataclass(eq=False)
class MpsClient:
    """A worker process on a shared GPU.

    Args:
        device: Name of the GPU.
        pid: Id of the process; 0 until its first message.
        busy: Whether it has had a job that computes on the device; a survey need not.
        reported: Whether a job of it has reported results of the device.
        verified: Whether it, or a descendant of it, was among the clients.
        misses: Number of checks at which it used the GPU without being a client.
        next_look: Time of its next check.
    """

    device: str
    pid: int = 0
    busy: bool = False
    reported: bool = False
    verified: bool = False
    misses: int = 0
    next_look: float = 0.0

    def due(self, now: float) -> bool:
        """Whether it is to be checked at `now` (seconds)."""
        return self.busy and bool(self.pid) and not self.verified and now >= self.next_look


class SharedGpu:
    """One GPU and its daemon, which `start` starts.

    Args:
        device: Name of the GPU.
        daemon: Its MPS daemon.
        device_file: Beginning of the paths of files that a process has open if it uses a GPU.
    """

    def __init__(self, device: str, daemon: MpsDaemon, device_file: str = _DEVICE_FILE) -> None:
        self.device = device
        self.daemon = daemon
        self.failures = 0  # in a row, without a client that reported in between
        self.proven = False  # whether a client has ever reported
        self._device_file = device_file
        self._runs = False
        self._servers: frozenset[int] = frozenset()
        self._next_look = 0.0
        self._failed = float("-inf")

    def start(self) -> None:
        """Start the daemon if it does not run.

        Raises:
            MpsError: The daemon cannot start.
        """
        if not (self._runs and self.daemon.alive()):
            self.daemon.start()
            self._runs = True
            self._servers = frozenset()

    def check(self, mps_clients: Collection[MpsClient], now: float) -> dict[MpsClient, str]:
        """Return the processes that must end, with reasons: all if the daemon or a server is dead, else non-clients.

        Args:
            mps_clients: All processes that are bound to this GPU.
            now: Seconds of a monotonic clock.
        """
        due = [client for client in mps_clients if client.due(now)]
        if not self._runs or not (due or now >= self._next_look):
            return {}
        self._next_look = now + LOOK_SECONDS
        if not self.daemon.alive():
            return self._died("daemon", mps_clients, now)
        if not all(map(is_alive, self._servers)):
            return self._died("server", mps_clients, now)
        if not due:
            return {}
        try:
            clients = self.daemon.clients()
        except MpsError as error:
            return self._died("daemon", mps_clients, now, f": {error}")
        self._servers = frozenset(clients)
        reasons = {}
        for client in due:
            if (reason := self._look_for(client, frozenset().union(*clients.values()), now)) is not None:
                reasons[client] = reason
        return reasons

    def _died(self, what: str, mps_clients: Collection[MpsClient], now: float, how: str = "") -> dict[MpsClient, str]:
        self._runs = False
        self._servers = frozenset()
        reached = [client for client in mps_clients if client.pid]
        if reached:
            self.fail(now)
        return dict.fromkeys(reached, f"MPS {what} of {self.device} died{how}; log: {self.daemon.log}")

    def _look_for(self, client: MpsClient, clients: Collection[int], now: float) -> str | None:
        """Check a process; return the reason if it must end, else None."""
        pids = {process.pid for process in process_tree(client.pid)}
        if not pids.isdisjoint(clients):
            client.verified = True
            self._proved(client)
            return None
        client.next_look = now + AGAIN_SECONDS
        if not any(_has_open(pid, self._device_file) for pid in pids):
            return None  # it does not use the GPU yet, or has ended
        client.misses += 1
        if not client.reported and client.misses < _MOST_MISSES:
            return None
        self.fail(now)
        return (
            f"worker process {client.pid} is no client of the MPS daemon of {self.device}, so its limits do not hold; "
            f"pipe directory: {self.daemon.directory.pipe}; log: {self.daemon.log}"
        )

    def fail(self, now: float) -> None:
        """Note a failure of MPS."""
        if now > self._failed + _INCIDENT_SECONDS:
            self.failures += 1
        self._failed = now

    def on_event(self, client: MpsClient) -> None:
        """Note results of the device from the process, which must be a client by now."""
        if not client.reported:
            client.reported = True
            client.next_look = 0.0
        if client.verified:
            self._proved(client)

    def _proved(self, client: MpsClient) -> None:
        if client.reported:
            self.proven = True
            self.failures = 0


def _has_open(pid: int, beginning: str) -> bool:
    """Whether a process has a file open whose path begins so; False if it has ended or is hidden."""
    for entry in _entries(Path(f"/proc/{pid}/fd")):
        try:
            if os.readlink(entry).startswith(beginning):
                return True
        except OSError:  # closed in the meantime
            continue
    return False


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
