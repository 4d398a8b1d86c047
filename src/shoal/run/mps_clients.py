"""Monitors the worker processes that share a GPU by MPS: whether each is a client, and whether its daemon is alive."""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import MpsError
from shoal.host.processes import is_alive, process_tree
from shoal.run.mps import MpsDaemon

__all__ = ["CHECK_SECONDS", "RECHECK_SECONDS", "MpsClient", "SharedGpu"]

CHECK_SECONDS = 1.0
"""Time between two checks of the daemon and its servers."""

RECHECK_SECONDS = 10.0
"""Time between two checks of a process that has not reported and is not an MPS client."""

_MAX_MISSES = 3
"""Number of checks at which such a process may use the GPU without being a client, since it may still connect."""

_INCIDENT_SECONDS = 10.0
"""Failures within this time count as one, since all clients of a server fail with the server."""

_DEVICE_FILE = "/dev/nvidia-uvm"
"""Device file that every process with an initialised CUDA context has open, with or without MPS."""


@dataclass(eq=False)
class MpsClient:
    """A worker process on a GPU that jobs share by MPS.

    Args:
        pid: Id of the process; 0 until its first message.
        busy: Whether it has had a job that computes on the device; a job that only finds signatures may not.
        verified: Whether it or one of its descendants was an MPS client at a check.
        misses: Number of checks at which it used the GPU without being a client.
    """

    device: str
    pid: int = 0
    busy: bool = False
    reported: bool = False
    verified: bool = False
    misses: int = 0
    next_check: float = 0.0

    def due(self, now: float) -> bool:
        """Return whether it is to be checked at `now` (seconds)."""
        return self.busy and bool(self.pid) and not self.verified and now >= self.next_check


class SharedGpu:
    """One GPU and its MPS daemon; `start` starts the daemon.

    Args:
        device_file: Beginning of the paths of files that a process has open if it uses a GPU.
    """

    def __init__(self, device: str, daemon: MpsDaemon, device_file: str = _DEVICE_FILE) -> None:
        self.device = device
        self.daemon = daemon
        self.failures = 0  # in a row, without a client that reported in between
        self.has_worked = False  # whether a client has ever reported
        self._device_file = device_file
        self._started = False
        self._servers: frozenset[int] = frozenset()
        self._next_check = 0.0
        self._last_failure = float("-inf")

    def start(self) -> None:
        """Start the daemon if it does not run; an MpsError if it cannot."""
        if not (self._started and self.daemon.alive()):
            self.daemon.start()
            self._started = True
            self._servers = frozenset()

    def check(self, mps_clients: Collection[MpsClient], now: float) -> dict[MpsClient, str]:
        """The processes that must end, with reasons: all if the daemon is dead, else its known clients if a server is
        dead, else non-clients. A process that has just begun may be a client of the daemon's next server.
        """
        due = [client for client in mps_clients if client.due(now)]
        if not self._started or not (due or now >= self._next_check):
            return {}
        self._next_check = now + CHECK_SECONDS
        if not self.daemon.alive():
            self._started = False
            return self._record_death("daemon", mps_clients, now)
        if not all(map(is_alive, self._servers)):
            return self._record_death("server", [client for client in mps_clients if client.verified], now)
        if not due:
            return {}
        try:
            clients = self.daemon.clients()
        except MpsError as error:
            self._started = False
            return self._record_death("daemon", mps_clients, now, f": {error}")
        self._servers = frozenset(clients)
        reasons = {}
        for client in due:
            if (reason := self._check_client(client, frozenset().union(*clients.values()), now)) is not None:
                reasons[client] = reason
        return reasons

    def _record_death(
        self, part: str, mps_clients: Collection[MpsClient], now: float, detail: str = ""
    ) -> dict[MpsClient, str]:
        self._servers = frozenset()
        running = [client for client in mps_clients if client.pid]
        if running:
            self.record_failure(now)
        return dict.fromkeys(running, f"MPS {part} of {self.device} died{detail}; log: {self.daemon.log}")

    def _check_client(self, client: MpsClient, clients: Collection[int], now: float) -> str | None:
        """Check a process; return the reason if it must end, else None."""
        pids = {process.pid for process in process_tree(client.pid)}
        if not pids.isdisjoint(clients):
            client.verified = True
            self._record_success(client)
            return None
        client.next_check = now + RECHECK_SECONDS
        if not any(_has_open_file(pid, self._device_file) for pid in pids):
            return None  # the process does not use the GPU yet, or has ended
        client.misses += 1
        if not client.reported and client.misses < _MAX_MISSES:
            return None
        self.record_failure(now)
        return (
            f"worker process {client.pid} is not a client of the MPS daemon of {self.device}, so its limits do not "
            f"hold; pipe directory: {self.daemon.directory.pipe}; log: {self.daemon.log}"
        )

    def record_failure(self, now: float) -> None:
        """Count a failure of MPS."""
        if now > self._last_failure + _INCIDENT_SECONDS:
            self.failures += 1
        self._last_failure = now

    def on_event(self, client: MpsClient) -> None:
        """Record that the process has reported results, so that it must be a client by now."""
        if not client.reported:
            client.reported = True
            client.next_check = 0.0
        if client.verified:
            self._record_success(client)

    def _record_success(self, client: MpsClient) -> None:
        if client.reported:
            self.has_worked = True
            self.failures = 0


def _has_open_file(pid: int, prefix: str) -> bool:
    """Return whether a process has a file open whose path begins so; False if it has ended or is hidden."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                if os.readlink(entry).startswith(prefix):
                    return True
    return False
