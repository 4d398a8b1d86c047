"""The engine's side of the fork server: it starts the server, requests workers and receives their exits."""

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO

from shoal.programs.opaque import RUNNER
from shoal.run.base import WorkerContext
from shoal.run.caller_fork import ForkedProcess, prepare_fork
from shoal.run.forkserver import NOTICE, REQUEST, STUDY, Setup, serve

__all__ = ["Exit", "ForkServer", "begin_imports", "describe_status", "imported_libraries"]

_log = logging.getLogger("shoal.run")

# The module path is set before the import, so that the server imports the same Shoal as the engine. Garbage is
# collected after the imports.
_BOOTSTRAP = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[2]); "
    "from shoal.run.forkserver import main; main()"
)
_GRACE_SECONDS = 10.0
"""Time in which a server must kill its workers; then the server is killed."""

_LIBRARIES = frozenset({"numpy", "pandas", "scipy", "sklearn", "torchvision"})
"""Libraries that take long to import, and whose import leaves no thread that a fork does not survive."""

_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""Settings of glibc. With its defaults glibc returns the memory of a step's tensors to the kernel after each step, and
the kernel clears it again for the next: a tenth of the time of a step of 32 small models, more with larger tensors."""


@dataclass(frozen=True)
class Exit:
    """The end of a worker process.

    Args:
        pid: Id of the process; 0 if the fork failed.
        reason: The exit in words: "was killed by SIGKILL (out of memory?)".
    """

    number: int
    pid: int
    reason: str


class _Process:
    """A server process and the socket to it; both end with this object."""

    def __init__(
        self,
        path: list[str],
        environment: dict[str, str],
        log: IO[bytes],
        forked: bool = False,
        imports: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.environment = environment
        self.inherited = _umask_and_affinity()
        self.forked = forked
        self.imports = imports
        self.control, server_end = socket.socketpair()
        for end in (self.control, server_end):
            end.settimeout(None)  # that of `socket.setdefaulttimeout` is not for these
        with server_end:
            start = self._fork if forked else self._spawn
            self._process = start(server_end, log)
        self.pid = self._process.pid
        self.close = weakref.finalize(self, _stop_process, self._process, self.control)
        _PROCESSES.add(self)

    def _fork(self, server_end: socket.socket, log: IO[bytes]) -> ForkedProcess:
        def run() -> None:
            self.control.close()
            serve(server_end)

        return ForkedProcess(run, log.fileno(), _ALLOCATOR)

    def _spawn(self, server_end: socket.socket, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-u",
                "-c",
                _BOOTSTRAP,
                str(server_end.fileno()),
                json.dumps(self.path),
                " ".join(self.imports),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[server_end.fileno()],
            start_new_session=True,
            env={**_ALLOCATOR, **self.environment},
        )

    def end_study(self) -> bool:
        """End the study of the server and all its workers; return whether the server can serve another study.

        A server that has had no study so far is not asked, since it may import for a while.
        """
        if self.imports:
            self.imports = ()
            return not self.ended()
        try:
            self.control.settimeout(_GRACE_SECONDS)
            self.control.sendall(REQUEST.pack(STUDY))
            while data := self.control.recv(NOTICE.size, socket.MSG_WAITALL):
                number, _, _ = NOTICE.unpack(data)
                if number == STUDY:
                    self.control.settimeout(None)
                    return True
        except OSError:  # the server has ended, or does not answer
            pass
        return False

    def ended(self) -> bool:
        """Return whether the process, which serves no study, has ended; else it sends nothing."""
        return bool(wait([self.control], 0))

    def wait(self) -> int:
        return self._process.wait()

    def detach(self) -> None:
        """Close the socket and leave the process alone: the caller is a fork of the engine."""
        self.close.detach()
        self.control.close()


class ForkServer:
    """The server process of a study.

    The process is a fork of this one where that is safe: torch and the task's modules need not be imported again. Else
    it is that of the last study, unless the environment, the module path, the umask or the CPU affinity has changed; or
    a new one. The constructor returns at once, while a new process imports torch. Requests before that wait in its
    socket.
    """

    def __init__(self, worker_context: WorkerContext) -> None:
        self.log = worker_context.directory / "logs" / "server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.ready = False
        self._closed = False
        # A file takes a task of any size at once; a pipe would block until the server reads.
        with self.log.open("ab") as log, tempfile.TemporaryFile() as setup:
            programs = worker_context.runner == RUNNER and "torch" in sys.modules  # the runner of tasks imports torch
            libraries = ["torch", *imported_libraries()] if programs else []
            pickle.dump(Setup(sys.argv, _working_directory(), worker_context, libraries), setup)
            setup.seek(0)
            self._process = _process(log, worker_context.fork)
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self.control, [REQUEST.pack(STUDY)], [setup.fileno(), log.fileno()])

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def control(self) -> socket.socket:
        """The socket to the process; readable when `next_exit` would not block."""
        return self._process.control

    def fork(self, number: int) -> Connection:
        """Request a worker and return the connection to it, which may be used at once.

        If the server has ended, the other end is closed, and `next_exit` raises.
        """
        engine_end, worker_end = Pipe()
        with worker_end, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [REQUEST.pack(number)], [worker_end.fileno()])
        return engine_end

    def kill(self, number: int) -> None:
        """Request the kill of a worker and of its descendants; its exit follows, if it was still running."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(REQUEST.pack(number))

    def next_exit(self) -> Exit | None:
        """Wait for a notice; return the exit of a worker, or None if it is about the study; EOFError at the end."""
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
        """Wait for the end of the server process, and return it in words."""
        return describe_status(self._process.wait())

    def close(self) -> None:
        """End all workers, and keep the process for the next study if it answers; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self.ready and not self._process.forked and self._process.end_study():
            _IDLE_PROCESSES.append(self._process)
        else:
            self._process.close()


def describe_status(status: int) -> str:
    """Return an exit status in words; a negative status is a signal, as in `subprocess`."""
    if status >= 0:
        return f"exited with status {status}"
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    return f"was killed by {signal.Signals(-status).name}"


def _stop_process(process: subprocess.Popen[bytes] | ForkedProcess, control: socket.socket) -> None:
    control.close()
    process.terminate()  # effective only during its imports; after that the closed socket ends it
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_PROCESSES: weakref.WeakSet[_Process] = weakref.WeakSet()
_IDLE_PROCESSES: deque[_Process] = deque(maxlen=1)
"""The process of the last study, or of the next one; a process that is pushed out of the queue ends."""


def _process(log: IO[bytes], may_fork: bool) -> _Process:
    """Return a fork of this process where that is safe, the process of the last study if it fits, or a new one."""
    path, environment = [entry or _working_directory() for entry in sys.path], dict(os.environ)
    why: str | None = "it may have imported other versions of the task's files"
    if may_fork:
        why = prepare_fork() if "torch" in sys.modules else "it has not imported torch"
    if why is None:
        return _Process(path, environment, log, forked=True)
    _log.debug("the workers are not forked from the calling process: %s", why)
    with suppress(IndexError):
        idle = _IDLE_PROCESSES.pop()
        same_environment = (idle.path, idle.environment, idle.inherited) == (path, environment, _umask_and_affinity())
        if same_environment and idle.end_study():
            return idle
        idle.close()
    return _Process(path, environment, log)


def imported_libraries() -> list[str]:
    """Modules of large libraries that this process has imported, and that its tasks may import."""
    return [name for name in list(sys.modules) if name.partition(".")[0] in _LIBRARIES and "._" not in name]


def begin_imports(runner: str, libraries: Sequence[str] = ()) -> None:
    """Start the server process of the next study now, unless one is idle, so that it imports during planning.

    For another runner than that of the study the time is lost. `libraries` are modules that its workers may need.
    """
    if all(process.ended() for process in _IDLE_PROCESSES):
        path = [entry or _working_directory() for entry in sys.path]
        with open(os.devnull, "wb") as log:
            _IDLE_PROCESSES.append(_Process(path, dict(os.environ), log, imports=[runner, *libraries]))


def _umask_and_affinity() -> tuple[object, ...]:
    """The other inherited properties that a study may depend on: umask and CPU affinity."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _detach_all() -> None:
    for process in list(_PROCESSES):
        process.detach()
    _IDLE_PROCESSES.clear()


# Otherwise a fork of the engine (a DataLoader's worker, a user's pool) would keep the control socket open after a kill
# of the engine, and the server and its workers would not end.
os.register_at_fork(after_in_child=_detach_all)
