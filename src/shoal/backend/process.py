"""What a worker process does: one job after another until one fails or the engine is gone."""

import faulthandler
import os
import pickle
import queue
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

from shoal.backend.base import Ended, Event, Outcome, Workplace
from shoal.backend.perform import perform, resolve
from shoal.cluster.device import Device
from shoal.planner.job import Job
from shoal.planner.orders import Orders
from shoal.worker.outcome import log_path

__all__ = ["CHANGE", "JOB", "REUSABLE", "STOP", "work"]

REUSABLE = frozenset({Outcome.FINISHED, Outcome.STOPPED})
"""Outcomes after which a process is fit for another job; after any other it exits."""

STOP, CHANGE, JOB = b"s", b"c", b"j"
"""First byte of a message: to stop the current job; for it, a pickled `Change`; for later, a pickled (Job, Device)."""

_ORPHANED = 75
"""Exit status of a worker without an engine."""

_Inbox = queue.SimpleQueue[tuple[bytes, Orders]]


def work(connection: Connection, workplace: Workplace) -> None:
    """Do the jobs that come over the connection and send back their events; returns after the first that fails."""
    faulthandler.enable()
    inbox: _Inbox = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), name="shoal-inbox", daemon=True).start()
    outcome = Outcome.FINISHED
    while outcome in REUSABLE:
        message, orders = inbox.get()
        job, device = pickle.loads(message)
        for event in perform(_run, job, device, workplace, orders):
            _send(connection, event)
            if isinstance(event, Ended):
                outcome = event.outcome


def _listen(connection: Connection, inbox: _Inbox) -> None:
    """Fill the inbox; end the process, whatever it is at, when the engine's end of the connection closes."""
    orders = Orders()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(_ORPHANED)
        kind, content = message[:1], message[1:]
        if kind == STOP:
            orders.stop()
        elif kind == CHANGE:
            orders.change(pickle.loads(content))
        else:
            orders = Orders()
            inbox.put((content, orders))


def _send(connection: Connection, event: Event) -> None:
    try:
        connection.send(event)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(_ORPHANED)


def _run(job: Job, device: Device, workplace: Workplace, orders: Orders) -> Iterator[Event]:
    """The runner, with all output of the process going to the job's log, that of C++ libraries too."""
    log = log_path(workplace.directory, job.id)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    yield from resolve(workplace.runner)(job, device, workplace, orders)
