"""The engine's side of the fork server: starting it, asking it for workers, hearing of their ends."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO

from shoal.backends.base import WorkerContext
from shoal.backends.forkserver import NOTICE, REQUEST, STUDY, Setup

__all__ = ["Exit", "ForkServer", "describe_status"]

# The path comes first, so that the server finds Shoal where the engine found it.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from shoal.backends.forkserver import main; main()"
)
_GRACE_SECONDS = 10.0
"""How long a server may take to kill its workers before it is killed itself."""

_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""For glibc, which else gives the memory of a step's tensors back to the kernel after each step, to be cleared anew in
the next: that takes a tenth of the time of a step of 32 small models, and more where tensors are some megabytes."""


@dataclass(frozen=True)
class Exit:
    """The end of a worker process.

    Args:
        number: as `ForkServer.fork` was given it.
        pid: of the process; 0 if it could not be forked.
        reason: the exit in words: "was killed by SIGKILL (out of memory?)".
    """

    number: int
    pid: int
    reason: str


class _Process:
    """A server process and the socket to it; both end with this object.

    Args:
        path: for its modules.
        environment: its variables.
        log: for what it prints until it serves a study.
    """

    def __init__(self, path: list[str], environment: dict[str, str], log: IO[bytes]) -> None:
        self.path = path
        self.environment = environment
        self.inherited = _inherited()
        self.control, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _BOOTSTRAP, str(remote.fileno()), json.dumps(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[remote.fileno()],
                start_new_session=True,
                env={**_ALLOCATOR, **environment},
            )
        self.pid = self._process.pid
        self.close = weakref.finalize(self, _shut, self._process, self.control)
        _PROCESSES.add(self)

    def rests(self) -> bool:
        """Have it end its study and all workers, and say whether it has, so that it can serve another study."""
        try:
            self.control.settimeout(_GRACE_SECONDS)
            self.control.sendall(REQUEST.pack(STUDY))
            while data := self.control.recv(NOTICE.size, socket.MSG_WAITALL):
                number, _, _ = NOTICE.unpack(data)
                if number == STUDY:
                    self.control.settimeout(None)
                    return True
        except OSError:  # it is gone, or does not answer
            pass
        return False

    def wait(self) -> int:
        """Wait for its end and return its exit status."""
        return self._process.wait()

    def disown(self) -> None:
        """Leave it to another process: this one is a fork of its engine."""
        self.close.detach()
        self.control.close()


class ForkServer:
    """The server process of a study.

    Making one returns at once, while the process imports torch. Requests made before it is ready wait in its socket.
    The process that the last study has left serves this one, unless the environment, the module path, the
    umask or the CPU affinity has changed.

    Args:
        worker_context: for all its workers.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self.log = worker_context.directory / "logs" / "server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.ready = False
        self._closed = False
        # A file and not a pipe: a task of any size is handed over without waiting for the reader.
        with self.log.open("ab") as log, tempfile.TemporaryFile() as setup:
            pickle.dump(Setup(sys.argv, _directory(), worker_context), setup)
            setup.seek(0)
            self._process = _process(log)
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self.control, [REQUEST.pack(STUDY)], [setup.fileno(), log.fileno()])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def control(self) -> socket.socket:
        """Can be read when there is something to `next_exit`."""
        return self._process.control

    def fork(self, number: int) -> Connection:
        """Ask for a worker and return the connection to it, which may be used at once.

        Of a server that is gone it is closed at the other end; `next_exit` is where that is noticed.
        """
        ours, theirs = Pipe()
        with theirs, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [REQUEST.pack(number)], [theirs.fileno()])
        return ours

    def kill(self, number: int) -> None:
        """Ask for the end of a worker and of all that it started; its exit follows, if it was still there."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(REQUEST.pack(number))

    def next_exit(self) -> Exit | None:
        """The next notice, if it is a worker's end; blocks until there is one.

        Raises:
            EOFError: the server is gone.
        """
        try:
            data = self.control.recv(NOTICE.size, socket.MSG_WAITALL)
        except ConnectionResetError:
            data = b""
        if len(data) < NOTICE.size:
            raise EOFError
        number, pid, status = NOTICE.unpack(data)
        if number == STUDY:
            self.ready = True
            return None
        if pid == 0:
            return Exit(number, pid, f"could not be forked: {os.strerror(status)}")
        return Exit(number, pid, describe_status(os.waitstatus_to_exitcode(status)))

    def wait(self) -> str:
        """Wait for the end of a server that is gone or going, and say how it ended."""
        return describe_status(self._process.wait())

    def close(self) -> None:
        """End all workers, and leave the process to the next study if it is in order; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self.ready and self._process.rests():
            _LEFT.append(self._process)
        else:
            self._process.close()


def describe_status(status: int) -> str:
    """An exit status in words; negative ones are signals, as in `subprocess`."""
    if status >= 0:
        return f"exited with status {status}"
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    return f"was killed by {signal.Signals(-status).name}"


def _shut(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.terminate()  # heeded only while it imports; after that the closed socket ends it
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_PROCESSES: weakref.WeakSet[_Process] = weakref.WeakSet()
_LEFT: deque[_Process] = deque(maxlen=1)
"""The process that the last study has left; one that is displaced ends."""


def _process(log: IO[bytes]) -> _Process:
    """The process that is left, if it was started alike and is still there, or a new one."""
    path, environment = [entry or _directory() for entry in sys.path], dict(os.environ)
    with suppress(IndexError):
        left = _LEFT.pop()
        alike = (left.path, left.environment, left.inherited) == (path, environment, _inherited())
        if alike and left.rests():
            return left
        left.close()
    return _Process(path, environment, log)


def _inherited() -> tuple[object, ...]:
    """What else of this process its children have, and a study may depend on: the cores, and who may read its files."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _directory() -> str:
    """The working directory; "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _disown_all() -> None:
    for process in list(_PROCESSES):
        process.disown()
    _LEFT.clear()


# A fork of the engine (a DataLoader's worker, a user's pool) would keep the control socket open, and so the server and
# its workers alive, after the engine was killed.
os.register_at_fork(after_in_child=_disown_all)
