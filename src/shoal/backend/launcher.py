"""The engine's side of the fork server: starting it, asking it for workers, hearing of their ends."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from shoal.backend.base import Workplace
from shoal.backend.forkserver import NOTICE, READY, REQUEST, Setup

__all__ = ["Exit", "ForkServer", "describe_status"]

# The path comes first, so that the server finds Shoal where the engine found it.
_BOOTSTRAP = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from shoal.backend.forkserver import main; main()"
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


class ForkServer:
    """A server process under the engine.

    Making one returns at once, while the process imports torch. Requests made before it is ready wait in its socket.

    Args:
        workplace: for all its workers.
    """

    def __init__(self, workplace: Workplace) -> None:
        self.log = workplace.directory / "logs" / "server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.ready = False
        self.control, remote = socket.socketpair()
        # A file and not a pipe: a task of any size is handed over without waiting for the reader.
        with remote, self.log.open("ab") as log, tempfile.TemporaryFile() as setup:
            pickle.dump([entry or os.getcwd() for entry in sys.path], setup)
            pickle.dump(Setup(sys.argv, remote.fileno(), workplace), setup)
            setup.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _BOOTSTRAP],
                stdin=setup,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[remote.fileno()],
                start_new_session=True,
                env={**_ALLOCATOR, **os.environ},
            )
        self._finalizer = weakref.finalize(self, _shut, self._process, self.control)
        _SERVERS.add(self)

    def fork(self, number: int) -> Connection:
        """Ask for a worker and return the connection to it, which may be used at once.

        Of a server that is gone it is closed at the other end; `hear` is where that is noticed.
        """
        ours, theirs = Pipe()
        with theirs, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [REQUEST.pack(number)], [theirs.fileno()])
        return ours

    def kill(self, number: int) -> None:
        """Ask for the end of a worker and of all that it started; its exit follows, if it was still there."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(REQUEST.pack(number))

    def hear(self) -> Exit | None:
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
        if number == READY:
            self.ready = True
            return None
        if pid == 0:
            return Exit(number, pid, f"could not be forked: {os.strerror(status)}")
        return Exit(number, pid, describe_status(os.waitstatus_to_exitcode(status)))

    def wait(self) -> str:
        """Wait for the end of a server that is gone or going, and say how it ended."""
        return describe_status(self._process.wait())

    def close(self) -> None:
        """End the server and, before that, all its workers; may be called twice."""
        self._finalizer()

    def disown(self) -> None:
        """Leave the server to another process: this one is a fork of its engine."""
        self._finalizer.detach()
        self.control.close()


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


_SERVERS: weakref.WeakSet[ForkServer] = weakref.WeakSet()


def _disown_all() -> None:
    for server in list(_SERVERS):
        server.disown()


# A fork of the engine (a DataLoader's worker, a user's pool) would keep the control socket open, and so the server and
# its workers alive, after the engine was killed.
os.register_at_fork(after_in_child=_disown_all)
