"""What a worker process does: one job after another until one fails or the engine is gone."""

import faulthandler
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from shoal.backend.base import Ended, Event, Outcome, Workplace
from shoal.backend.perform import StopFlag, log_path, perform, resolve
from shoal.cluster.device import Device
from shoal.planner.job import Job

__all__ = ["REUSABLE", "STOP", "work"]

REUSABLE = frozenset({Outcome.FINISHED, Outcome.STOPPED})
"""Outcomes after which a process is fit for another job; after any other it exits."""

STOP = b""
"""The message that stops the current job; every other message is a pickled (Job, Device)."""

_ORPHANED = 75
"""Exit status of a worker without an engine."""

_Inbox = queue.SimpleQueue[tuple[bytes, StopFlag]]


def work(connection: Connection, workplace: Workplace) -> None:
    """Do the jobs that come over the connection and send back their events; returns after the first that fails."""
    faulthandler.enable()
    inbox: _Inbox = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), name="shoal-inbox", daemon=True).start()
    outcome = Outcome.FINISHED
    while outcome in REUSABLE:
        message, stop = inbox.get()
        job, device = pickle.loads(message)
        for event in perform(_run, job, device, workplace, stop):
            _send(connection, event)
            if isinstance(event, Ended):
                outcome = event.outcome


def _listen(connection: Connection, inbox: _Inbox) -> None:
    """Fill the inbox; end the process, whatever it is at, when the engine's end of the connection closes."""
    stop = StopFlag()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(_ORPHANED)
        if message == STOP:
            stop.requested = True
        else:
            stop = StopFlag()
            inbox.put((message, stop))


def _send(connection: Connection, event: Event) -> None:
    try:
        connection.send(event)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(_ORPHANED)


def _run(job: Job, device: Device, workplace: Workplace, stopping: Callable[[], bool]) -> Iterator[Event]:
    """The runner, with all output of the process going to the job's log, that of C++ libraries too."""
    log = log_path(workplace, job.id)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    yield from resolve(workplace.runner)(job, device, workplace, stopping)
