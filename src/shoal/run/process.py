"""The main function of a worker process: one job after another until one fails or the engine has ended."""

import faulthandler
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from shoal.core.device import Device
from shoal.core.job import Job, log_path
from shoal.host.process_settings import apply
from shoal.run.base import Ended, Event, Heartbeat, Outcome, WorkerContext
from shoal.run.gpu_sharing import Binding
from shoal.run.run_job import resolve, run_job
from shoal.train.control import JobControl

__all__ = ["CHANGE", "JOB", "REUSABLE", "STOP", "Hello", "work"]

REUSABLE = frozenset({Outcome.FINISHED, Outcome.STOPPED})
"""Outcomes after which a process takes another job; after any other outcome it exits."""

STOP, CHANGE, JOB = b"s", b"c", b"j"
"""First byte of a message: stop the current job; a pickled `JobUpdate` for it; a pickled (Binding, Job, Device, time
of `time.monotonic` when it was sent)."""

HEARTBEAT_SECONDS = 1.0
"""Time between two checks of whether a job makes progress."""

_ORPHANED = 75
"""Exit status of a worker without an engine."""


@dataclass(frozen=True)
class Hello:
    """The first message of a worker, with the id of its process."""

    pid: int


_Inbox = queue.SimpleQueue[tuple[bytes, JobControl]]


def work(connection: Connection, worker_context: WorkerContext) -> None:
    """Run the jobs that arrive over the connection and send back their events; return after the first failed job."""
    faulthandler.enable()
    apply(worker_context.settings)
    inbox: _Inbox = queue.SimpleQueue()
    sender = _EventSender(connection)
    sender.send_event(Hello(os.getpid()))
    threading.Thread(target=sender.send_heartbeats, name="shoal-heart", daemon=True).start()
    threading.Thread(target=_receive_messages, args=(connection, inbox), name="shoal-inbox", daemon=True).start()
    outcome: Outcome | None = None
    while outcome is None or outcome in REUSABLE:
        message, control = inbox.get()
        binding: Binding
        binding, job, device, sent = pickle.loads(message)
        start_seconds = max(0.0, time.monotonic() - sent) if outcome is None else 0.0
        binding.apply()  # every job of this process has this binding
        sender.begin(job.id, control)
        for event in run_job(_run_with_log, job, device, worker_context, control, start_seconds):
            sender.send_event(event)
            if isinstance(event, Ended):
                outcome = event.outcome


def _receive_messages(connection: Connection, inbox: _Inbox) -> None:
    """Fill the inbox; end the process at once when the engine's end of the connection closes."""
    control = JobControl()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(_ORPHANED)
        kind, content = message[:1], message[1:]
        if kind == STOP:
            control.stop()
        elif kind == CHANGE:
            control.change(pickle.loads(content))
        else:
            control = JobControl()
            inbox.put((content, control))


class _EventSender:
    """Sends events to the engine, from any thread, and once a second a heartbeat if the job makes progress."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._job: str | None = None
        self._control = JobControl()

    def begin(self, job: str, control: JobControl) -> None:
        with self._lock:
            self._job, self._control = job, control

    def send_event(self, event: Event | Hello) -> None:
        """Send an event; after the `Ended` of a job, no heartbeat of it follows."""
        with self._lock:
            if isinstance(event, Ended):
                self._job = None
            self._send(event)

    def send_heartbeats(self) -> None:
        last_beats = 0
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            with self._lock:
                if self._job is not None and self._control.beats != last_beats:
                    last_beats = self._control.beats
                    self._send(Heartbeat(self._job, self._control.settled))

    def _send(self, event: Event | Hello) -> None:
        try:
            self._connection.send(event)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(_ORPHANED)


def _run_with_log(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Call the runner with all output of the process, also that of C++ libraries, in the job's log."""
    log = log_path(worker_context.directory, job.id)
    log.parent.mkdir(exist_ok=True)  # not the study's directory, which was moved then
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    yield from resolve(worker_context.runner)(job, device, worker_context, control)
