"""One process per running job on this machine, forked from a server that has torch imported.

A fresh worker takes some ten milliseconds. One whose job ended well is kept for the next job on its device, with its
data sets and imports warm, and takes about a millisecond. `forkserver` says why the standard library's is not used.
"""

import pickle
import time
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, wait

from shoal.backends.base import Backend, Ended, Event, Outcome, WorkerContext
from shoal.backends.gpu_sharing import Binding, GpuSharing
from shoal.backends.launcher import Exit, ForkServer
from shoal.backends.mps_clients import MpsClient
from shoal.backends.process import CHANGE, JOB, REUSABLE, STOP, Hello
from shoal.cluster.processes import created, end
from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.core.job import Job, JobUpdate, log_path

__all__ = ["Local"]

_LOG_LINES = 20
"""Lines of the server's log that an error shows."""

_KILLED, _MOST_KILLS = "was killed by", 5
"""How the end of a server that a signal killed is told, and how many in a row may come before a job ends well."""

_DEATH_SECONDS = 10.0
"""For the workers of a dead server, which hold its devices, once they are killed."""


@dataclass(eq=False)
class _Worker:
    """A worker process as the engine knows it.

    Args:
        connection: to the process.
        device: name of the only device it ever works on.
        binding: what ties it to that device.
        client: what is known of it where it shares a GPU by MPS.
        pid: of the process; 0 until it has said so.
        began: when, as `created` tells it.
        job: what it works on; None while it is idle.
        listening: whether more events may come.
        verdict: the end of a job that failed, held back until the process has freed its device.
        had: ids of the jobs that it has worked on.
        doomed: whether it was told to be killed; it gets no other job.
    """

    connection: Connection
    device: str
    binding: Binding
    client: MpsClient | None = None
    pid: int = 0
    began: float = 0.0
    job: str | None = None
    listening: bool = True
    verdict: Ended | None = None
    had: set[str] = field(default_factory=set)
    doomed: bool = False

    def send(self, message: bytes) -> bool:
        """Send, and say whether there was still a process to send to; its exit is told by the server."""
        try:
            self.connection.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def take(self, job: str) -> None:
        """Work on a job from now on."""
        self.job = job
        self.had.add(job)

    def receive(self) -> Event | None:
        """The next event, waiting for a message; None if that is no event, or none will come."""
        try:
            message: Event | Hello = self.connection.recv()
        except (EOFError, OSError):
            self.listening = False
            return None
        if isinstance(message, Hello):
            self.pid, self.began = message.pid, created(message.pid)
            if self.client is not None:
                self.client.pid = message.pid
            return None
        return message


class Local(Backend):
    """Runs each job in a worker process of its own.

    Args:
        worker_context: of the study.
        sharing: how jobs share a GPU; by default as the workplace says.
    """

    def __init__(self, worker_context: WorkerContext, sharing: GpuSharing | None = None) -> None:
        super().__init__(worker_context)
        self._sharing = sharing if sharing is not None else GpuSharing(worker_context.sharing)
        self._server = ForkServer(worker_context)
        self._kills = 0  # of servers since a job ended well
        self._late: list[Event] = []  # for the next poll, since this one raises
        self._numbers = count(1)
        self._workers: dict[int, _Worker] = {}
        self._closed = False

    @property
    def starting(self) -> bool:
        """Whether the process that forks workers is importing what they need."""
        return not self._server.ready

    def start(self, job: Job, device: Device) -> None:
        """Give the job to an idle worker that is bound to the device as the job needs it, or to a new one.

        Best is one that had the job which it resumes.

        Raises:
            BackendError: the back end is closed, a job of that id is running, or the device cannot be shared as asked.
        """
        if self._closed:
            raise BackendError(f"job {job.id!r} cannot start: the back end is closed")
        if self._worker_of(job.id) is not None:
            raise BackendError(f"job {job.id!r} cannot start: a job of that id is running")
        binding = self._sharing.bind(job, device)
        message = JOB + pickle.dumps((binding, job, device))
        idle = {n: worker for n, worker in self._workers.items() if worker.job is None and worker.device == device.name}
        for worker in sorted(idle.values(), key=lambda worker: job.resumes not in worker.had):
            if worker.binding == binding and not worker.doomed and worker.send(message):
                self._sharing.begin(worker.client, job)
                worker.take(job.id)
                return
        for number, worker in idle.items():
            if worker.binding != binding:  # it would hold memory of the device for nothing
                self._retire(number)
        worker = self._fork(device, binding)
        self._sharing.begin(worker.client, job)
        worker.take(job.id)
        worker.send(message)

    def stop(self, job: str) -> None:
        """Make the job's `stopping` true."""
        worker = self._worker_of(job)
        if worker is not None:
            worker.send(STOP)

    def kill(self, job: str) -> None:
        """Kill the job's worker, and all that it started."""
        for number, worker in self._workers.items():
            if worker.job == job:
                worker.doomed = True
                self._server.kill(number)

    def vacate(self, device: str) -> None:
        """Let the idle workers of the device exit."""
        for number in [number for number, x in self._workers.items() if x.job is None and x.device == device]:
            self._retire(number)

    def change(self, job: str, change: JobUpdate) -> None:
        """Send the change to the job's worker."""
        worker = self._worker_of(job)
        if worker is not None:
            worker.send(CHANGE + pickle.dumps(change))

    def poll(self, timeout: float) -> list[Event]:
        """Events since the last call, in order; waits up to `timeout` seconds for the first.

        Raises:
            BackendError: the server could not import the runner, or is killed again and again. The jobs' ends follow.
        """
        deadline = time.monotonic() + timeout
        while not self._closed:
            if self._late:
                late, self._late = self._late, []
                return late
            events = self._collect(max(0.0, deadline - time.monotonic()))
            if events or time.monotonic() >= deadline:
                return events
        return []

    def close(self) -> None:
        """Kill the server and all workers, and wait until they are gone."""
        self._closed = True
        for worker in self._workers.values():
            worker.connection.close()
        self._workers.clear()
        self._server.close()
        self._sharing.close()

    def _worker_of(self, job: str) -> _Worker | None:
        return next((worker for worker in self._workers.values() if worker.job == job), None)

    def _fork(self, device: Device, binding: Binding) -> _Worker:
        number = next(self._numbers)
        worker = _Worker(self._server.fork(number), device.name, binding, self._sharing.client(binding, device))
        self._workers[number] = worker
        return worker

    def _retire(self, number: int) -> None:
        """Let an idle worker go: it exits when its connection ends."""
        self._workers.pop(number).connection.close()

    def _evict(self) -> None:
        """Kill the workers whose share of a GPU does not hold; their jobs end when the processes are gone."""
        reasons = self._sharing.check([worker.client for worker in self._workers.values() if worker.client is not None])
        for number, worker in list(self._workers.items()) if reasons else ():
            if worker.client is None or worker.client not in reasons or worker.verdict is not None:
                continue
            self._server.kill(number)
            if worker.job is None:
                self._retire(number)
            else:
                log = log_path(self.worker_context.directory, worker.job)
                worker.verdict = Ended(worker.job, Outcome.LOST, f"{reasons[worker.client]}\nLog: {log}")

    def _collect(self, timeout: float) -> list[Event]:
        """What one wait brings: at most one event of each worker, and one notice of the server."""
        self._evict()
        speakers = {worker.connection: worker for worker in self._workers.values() if worker.listening}
        ready = wait([*speakers, self._server.control], min(timeout, self._sharing.pause))
        events: list[Event] = []
        # Events before notices: what a worker sent before it died comes before its end.
        for connection, worker in speakers.items():
            if connection in ready:
                events += self._hear(worker)
        if self._server.control in ready:
            try:
                notice = self._server.next_exit()
            except EOFError:
                events += self._replace_server()
            else:
                events += self._bury(notice) if notice is not None else []
        return events

    def _hear(self, worker: _Worker) -> list[Event]:
        event = worker.receive()
        if event is None:
            return []
        if isinstance(event, Ended):
            if worker.verdict is not None:  # it has been killed, for which there is a reason already
                return []
            if event.outcome not in REUSABLE:
                worker.verdict = self._sharing.judged(worker.client, event)
                return []
            worker.job = None
            self._kills = 0
        self._sharing.on_event(worker.client, event)
        return [event]

    def _bury(self, end: Exit) -> list[Event]:
        """The last events of a worker whose process is gone."""
        worker = self._workers.pop(end.number, None)
        if worker is None:
            return []
        return self._last_words(worker, Outcome.CRASHED, f"worker process {end.pid} {end.reason}")

    def _last_words(self, worker: _Worker, outcome: Outcome, reason: str) -> list[Event]:
        """The events of a worker whose process is gone, and the end of its job.

        Args:
            worker: of which nothing more is known from now on.
            outcome: of a job that has not told its end itself.
            reason: of that, in words.
        """
        events: list[Event] = []
        # Not until end of file: a process that the worker left behind may hold its end open.
        while worker.listening and worker.connection.poll():
            events += self._hear(worker)
        worker.connection.close()
        if worker.verdict is not None:
            events.append(worker.verdict)
        elif worker.job is not None:
            log = log_path(self.worker_context.directory, worker.job)
            events.append(Ended(worker.job, outcome, f"{reason}\nLog: {log}"))
        return events

    def _replace_server(self) -> list[Event]:
        """The last events of all workers of a server that died, and a new server.

        Nobody would collect its workers or clear up behind them, so they end too; that is no fault of their trials. A
        job that it was yet to fork a worker for ends likewise.

        Raises:
            BackendError: it died before it was ready, so a new one would too; or was killed again and again.
        """
        reason = self._server.wait()
        self._kills += 1
        events: list[Event] = []
        while self._workers:
            _, worker = self._workers.popitem()
            if worker.pid:
                end(worker.pid, worker.began, _DEATH_SECONDS)
            events += self._last_words(worker, Outcome.ORPHANED, f"the server of its worker process {reason}")
        if self._kills >= _MOST_KILLS or (not self._server.ready and _KILLED not in reason):
            self._late = events
            often = f", as {self._kills} in a row have, and no job ended in between" if self._kills > 1 else ""
            when = "" if self._server.ready else " before it could start a worker"
            lines = self._server.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            raise BackendError(
                f"the server of the local back end {reason}{when}{often}; "
                f"the end of its log, {self._server.log}:\n" + "\n".join(lines)
            )
        self._server.close()
        self._server = ForkServer(self.worker_context)
        return events
