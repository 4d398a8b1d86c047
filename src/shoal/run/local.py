"""The local back end: one process for each running job on this machine, forked from a server that has torch imported.

A new worker starts in about ten milliseconds. A worker whose job ended well is kept for the next job on its device: it
has data sets and imports in memory, and starts that job in about a millisecond. The module `forkserver` gives the
reasons against the server of the standard library.
"""

import pickle
import time
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, wait

from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.core.job import Job, JobUpdate, log_path
from shoal.host.processes import kill_tree, start_time
from shoal.run.base import Backend, Ended, Event, Outcome, WorkerContext
from shoal.run.gpu_sharing import Binding, GpuSharing
from shoal.run.launcher import Exit, ForkServer
from shoal.run.mps_clients import MpsClient
from shoal.run.process import CHANGE, JOB, REUSABLE, STOP, Hello

__all__ = ["Local"]

_ERROR_LOG_LINES = 20

_KILLED, _MAX_SERVER_KILLS = "was killed by", 5
"""Beginning of the exit of a server in words if a signal killed it; limit of such exits without a finished job."""

_KILL_WAIT_SECONDS = 10.0
"""Longest wait for the end of a killed worker of a dead server; until then the worker holds its device."""


@dataclass(eq=False)
class _Worker:
    connection: Connection
    device: str
    binding: Binding
    client: MpsClient | None = None
    pid: int = 0
    started: float = 0.0
    job: str | None = None
    open: bool = True
    held_end: Ended | None = None
    past_jobs: set[str] = field(default_factory=set)
    kill_requested: bool = False

    def send(self, message: bytes) -> bool:
        """Send a message; return False if the process has ended. The server reports its exit."""
        try:
            self.connection.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def assign(self, job: str) -> None:
        self.job = job
        self.past_jobs.add(job)

    def receive(self) -> Event | None:
        """Wait for a message; return its event, or None if it is not an event or the connection is closed."""
        try:
            message: Event | Hello = self.connection.recv()
        except (EOFError, OSError):
            self.open = False
            return None
        if isinstance(message, Hello):
            self.pid, self.started = message.pid, start_time(message.pid)
            if self.client is not None:
                self.client.pid = message.pid
            return None
        return message


class Local(Backend):
    """Runs each job in a worker process of its own; `sharing` binds it to GPUs, by default that of `worker_context`."""

    def __init__(self, worker_context: WorkerContext, sharing: GpuSharing | None = None) -> None:
        super().__init__(worker_context)
        self._sharing = sharing if sharing is not None else GpuSharing(worker_context.sharing)
        self._server = ForkServer(worker_context)
        self._server_kills = 0  # kills of servers since a job ended well
        self._pending_events: list[Event] = []  # for the next poll, if a poll raises
        self._numbers = count(1)
        self._workers: dict[int, _Worker] = {}
        self._closed = False

    @property
    def starting(self) -> bool:
        """Whether the server is still importing the modules of its workers."""
        return not self._server.ready

    def start(self, job: Job, device: Device) -> None:
        """Give the job to an idle worker with its binding, first that of the job it resumes, or to a new one."""
        if self._closed:
            raise BackendError(f"job {job.id!r} cannot start: the back end is closed")
        if self._worker_of(job.id) is not None:
            raise BackendError(f"job {job.id!r} cannot start: a job of that id is running")
        binding = self._sharing.bind(job, device)
        message = JOB + pickle.dumps((binding, job, device, time.monotonic()))
        idle = {n: worker for n, worker in self._workers.items() if worker.job is None and worker.device == device.name}
        for worker in sorted(idle.values(), key=lambda worker: job.resumes not in worker.past_jobs):
            if worker.binding == binding and not worker.kill_requested and worker.send(message):
                self._sharing.begin(worker.client, job)
                worker.assign(job.id)
                return
        for number, worker in idle.items():
            if worker.binding != binding:  # the idle worker still holds memory of the device
                self._end_idle_worker(number)
        number = next(self._numbers)
        worker = _Worker(self._server.fork(number), device.name, binding, self._sharing.client(binding, device))
        self._workers[number] = worker
        self._sharing.begin(worker.client, job)
        worker.assign(job.id)
        worker.send(message)

    def stop(self, job: str) -> None:
        """Send the request to stop to the job's worker."""
        worker = self._worker_of(job)
        if worker is not None:
            worker.send(STOP)

    def kill(self, job: str) -> None:
        """Kill the job's worker and its descendants."""
        for number, worker in self._workers.items():
            if worker.job == job:
                worker.kill_requested = True
                self._server.kill(number)

    def can_limit_compute(self, device: Device) -> bool:
        """Return whether MPS limits the processes on a device."""
        return self._sharing.can_limit_compute(device)

    def release_device(self, device: str) -> None:
        """End the idle workers of the device."""
        for number in [number for number, x in self._workers.items() if x.job is None and x.device == device]:
            self._end_idle_worker(number)

    def change(self, job: str, change: JobUpdate) -> None:
        """Send the change to the job's worker."""
        worker = self._worker_of(job)
        if worker is not None:
            worker.send(CHANGE + pickle.dumps(change))

    def poll(self, timeout: float) -> list[Event]:
        """Return the events since the last call, in order; wait up to `timeout` seconds for the first.

        A server that cannot import the runner or is killed repeatedly is a BackendError; the ends of the jobs follow.
        """
        deadline = time.monotonic() + timeout
        while not self._closed:
            if self._pending_events:
                events, self._pending_events = self._pending_events, []
                return events
            events = self._collect(max(0.0, deadline - time.monotonic()))
            if events or time.monotonic() >= deadline:
                return events
        return []

    def close(self) -> None:
        """End the workers and the daemons; keep the server for the next study, or end it."""
        self._closed = True
        for worker in self._workers.values():
            worker.connection.close()
        self._workers.clear()
        self._server.close()
        self._sharing.close()

    def _worker_of(self, job: str) -> _Worker | None:
        return next((worker for worker in self._workers.values() if worker.job == job), None)

    def _end_idle_worker(self, number: int) -> None:
        """End an idle worker: it exits when its connection closes."""
        self._workers.pop(number).connection.close()

    def _kill_failed_clients(self) -> None:
        """Kill the workers whose MPS limits do not hold; their jobs end when the processes have ended."""
        reasons = self._sharing.check([worker.client for worker in self._workers.values() if worker.client is not None])
        for number, worker in list(self._workers.items()) if reasons else ():
            if worker.client is None or worker.client not in reasons or worker.held_end is not None:
                continue
            self._server.kill(number)
            if worker.job is None:
                self._end_idle_worker(number)
            else:
                log = log_path(self.worker_context.directory, worker.job)
                worker.held_end = Ended(worker.job, Outcome.LOST, f"{reasons[worker.client]}\nLog: {log}")

    def _collect(self, timeout: float) -> list[Event]:
        """Wait once; return at most one event of each worker, and the events of at most one notice of the server."""
        self._kill_failed_clients()
        connections = {worker.connection: worker for worker in self._workers.values() if worker.open}
        ready = wait([*connections, self._server.control], min(timeout, self._sharing.check_interval))
        events: list[Event] = []
        # Events before notices: the events that a worker sent come before the end of its job.
        for connection, worker in connections.items():
            if connection in ready:
                events += self._receive(worker)
        if self._server.control in ready:
            try:
                notice = self._server.next_exit()
            except EOFError:
                events += self._replace_server()
            else:
                events += self._on_exit(notice) if notice is not None else []
        return events

    def _receive(self, worker: _Worker) -> list[Event]:
        """Return the next event of a worker; none for the end of a failed job, which is held back."""
        event = worker.receive()
        if event is None:
            return []
        if isinstance(event, Ended):
            if worker.held_end is not None:  # the reason of the kill takes precedence
                return []
            if event.outcome not in REUSABLE:
                worker.held_end = self._sharing.reclassified(worker.client, event)
                return []
            worker.job = None
            self._server_kills = 0
        self._sharing.on_event(worker.client, event)
        return [event]

    def _on_exit(self, end: Exit) -> list[Event]:
        """Remove a worker whose process has ended; return its last events."""
        worker = self._workers.pop(end.number, None)
        if worker is None:
            return []
        return self._final_events(worker, Outcome.CRASHED, f"worker process {end.pid} {end.reason}")

    def _final_events(self, worker: _Worker, outcome: Outcome, reason: str) -> list[Event]:
        """Return the remaining events of a worker whose process has ended, and the end of its job."""
        events: list[Event] = []
        # Do not wait for the end of file, since a descendant of the worker may keep the connection open.
        while worker.open and worker.connection.poll():
            events += self._receive(worker)
        worker.connection.close()
        if worker.held_end is not None:
            events.append(worker.held_end)
        elif worker.job is not None:
            log = log_path(self.worker_context.directory, worker.job)
            events.append(Ended(worker.job, outcome, f"{reason}\nLog: {log}"))
        return events

    def _replace_server(self) -> list[Event]:
        """End all workers of a server that died, start a new server, and return the last events of the workers.

        No other process could reap the workers or kill their descendants, so they end too, as `ORPHANED`, which is no
        failure of their trials. A job without a forked worker ends likewise.
        """
        reason = self._server.wait()
        self._server_kills += 1
        events: list[Event] = []
        while self._workers:
            _, worker = self._workers.popitem()
            if worker.pid:
                kill_tree(worker.pid, worker.started, _KILL_WAIT_SECONDS)
            events += self._final_events(worker, Outcome.ORPHANED, f"the server of its worker process {reason}")
        if self._server_kills >= _MAX_SERVER_KILLS or (not self._server.ready and _KILLED not in reason):
            self._pending_events = events
            repeated = (
                f", as {self._server_kills} in a row have, and no job ended in between"
                if self._server_kills > 1
                else ""
            )
            when = "" if self._server.ready else " before it could start a worker"
            lines = self._server.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_ERROR_LOG_LINES:]
            raise BackendError(
                f"the server of the local back end {reason}{when}{repeated}; "
                f"the end of its log, {self._server.log}:\n" + "\n".join(lines)
            )
        self._server.close()
        self._server = ForkServer(self.worker_context)
        return events
