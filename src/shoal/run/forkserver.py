"""The fork server process: it has torch and the runner imported, and forks a worker for each request of the engine.

The standard library's `multiprocessing` "forkserver" is not suitable: its children import the user's `__main__` again,
which trains once more if a script has no `if __name__ == "__main__"` guard and fails if there is no file (a notebook).
Its server is one per process, so the user's own pools would share its settings. It hides an ImportError of a preloaded
module. Here the task arrives as bytes, nothing imports `__main__`, and the server, the parent of all workers, reports
the exit status of each to the engine.

The engine and this process hold the two ends of the control socket:

- Engine to server: a `REQUEST` with the worker's number, and the worker's end of its connection as a file descriptor.
  A request without a descriptor kills that worker and all processes that it started.
- A request of number `STUDY` begins a study: its descriptors are a file with a pickled `Setup`, and the log for the
  output of the server. Without descriptors it ends the study and all its workers.
- Server to engine: a `NOTICE` of number `STUDY` when the server has begun or ended a study, and a notice when a worker
  has ended.

The server is a fork of the engine's process where that is safe (see `caller_fork`), else a new process, which imports
torch and the runner. A new process outlives its study, so that the next study of the engine need not import torch
again. It exits after `IDLE_SECONDS` without a study. User code runs in workers only, so a study leaves no state in the
server.

When the server reads the end of file from the socket, the engine has ended: the server kills all its workers and exits.
The server has its own session, so a Ctrl-C or hang-up of the terminal reaches the engine alone. It stays
single-threaded, since `fork` copies only the calling thread.
"""

import errno
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from shoal.host.processes import kill, note_inherited_memory, offer_to_oom_killer, process_tree
from shoal.run.base import WorkerContext
from shoal.run.process import work
from shoal.run.run_job import resolve

__all__ = ["NOTICE", "REQUEST", "STUDY", "Setup", "main", "serve"]

REQUEST = struct.Struct("!Q")
"""The number of the worker to fork or to kill, 1 or more."""

NOTICE = struct.Struct("!QQq")
"""A worker's number; its pid and its status as of `waitpid`, or pid 0 and the errno of the fork that failed."""

STUDY = 0

IDLE_SECONDS = 300.0


@dataclass(frozen=True)
class Setup:
    """The settings of a study for its server.

    Args:
        directory: Working directory of the engine; "" if it was removed.
        libraries: Modules of libraries that the server imports, if they are installed, for its workers and their forks.
    """

    argv: list[str]
    directory: str
    worker_context: WorkerContext
    libraries: Sequence[str] = ()


def main() -> None:
    """Serve in a new process; the arguments are the control socket's number, the module path, and a runner or "" with
    the modules of libraries that are imported before the first study."""
    runner, *libraries = sys.argv[3].split() or [""]
    if runner:
        with suppress(Exception):  # the study's own import fails again, with a log
            _import(runner, libraries)
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # no output is left to flush, and an orderly exit with torch takes a sixth of a second


def serve(control: socket.socket) -> None:
    """Serve one study after another until the engine ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.set_inheritable(False)
    with control:
        _Server(control).serve()


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._worker_context: WorkerContext | None = None
        self._worker_numbers: dict[int, int] = {}  # pid -> number
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()

    def serve(self) -> None:
        """Fork and reap until the control socket closes; leave no child behind."""
        self._wakeup_reader.setblocking(False)
        self._wakeup_writer.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # set_wakeup_fd needs a handler
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                while self._handle_next():
                    pass
        finally:
            self._kill_all()
            signal.set_wakeup_fd(-1)
            self._wakeup_reader.close()
            self._wakeup_writer.close()

    def _handle_next(self) -> bool:
        """Wait for a request or for the end of a child, and handle it; return whether to continue."""
        ready = wait([self._control, self._wakeup_reader], IDLE_SECONDS if self._worker_context is None else None)
        if self._wakeup_reader in ready:
            self._wakeup_reader.recv(4096)
            self._reap()
        if self._control in ready:
            data, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, 2)
            if not data:
                return False
            (number,) = REQUEST.unpack(data)
            if number == STUDY and descriptors:
                self._begin_study(*descriptors)
            elif number == STUDY:
                self._end_study()
            elif descriptors:
                self._fork_worker(number, descriptors[0])
            else:
                self._kill_worker(number)
        return bool(ready)

    def _begin_study(self, setup: int, log: int) -> None:
        """Begin a study: import the modules of its workers; SIGTERM can interrupt the import."""
        _redirect_output(log)
        with open(setup, "rb") as file:
            study: Setup = pickle.load(file)
        sys.argv[:] = study.argv
        try:
            os.chdir(study.directory)
        except OSError:  # the directory was removed or is not accessible; oneMKL cannot be loaded in such a directory
            os.chdir("/")
        sys.path_importer_cache.clear()  # relative directories were those of the last study
        _import(study.worker_context.runner, study.libraries)
        gc.freeze()  # objects alive now are not collected by workers, so their pages stay shared
        self._worker_context = study.worker_context
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on only the closed control socket ends the server
        self._control.sendall(NOTICE.pack(STUDY, os.getpid(), 0))

    def _end_study(self) -> None:
        """End the study, if there is one, and its workers; its directory may be removed after that."""
        self._kill_all()
        _redirect_output(os.open(os.devnull, os.O_WRONLY))
        os.chdir("/")
        self._worker_context = None
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._control.sendall(NOTICE.pack(STUDY, os.getpid(), 0))

    def _kill_worker(self, number: int) -> None:
        for pid, worker in self._worker_numbers.items():
            if worker == number:
                _kill_tree(pid)

    def _fork_worker(self, number: int, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        try:
            pid = os.fork()
        except OSError as error:
            self._control.sendall(NOTICE.pack(number, 0, error.errno or errno.EAGAIN))
        else:
            if pid == 0:
                self._become_worker(descriptor)
            self._worker_numbers[pid] = number
            # The child does the same, so that the group exists before the first kill, whichever process runs first.
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)
        os.close(descriptor)

    def _become_worker(self, descriptor: int) -> None:
        """Run the worker in the child process; never return to the server's loop."""
        status = 1
        try:
            os.setpgid(0, 0)
            note_inherited_memory()
            offer_to_oom_killer()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for handle in (self._control, self._wakeup_reader, self._wakeup_writer):
                handle.close()
            assert self._worker_context is not None
            work(Connection(descriptor), self._worker_context)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Kill the group of every child that has ended, and send the engine a notice."""
        while self._worker_numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._worker_numbers.pop(pid, None)
            if number is not None:
                _kill_process_group(pid)
                self._control.sendall(NOTICE.pack(number, pid, status))

    def _kill_all(self) -> None:
        for pid in self._worker_numbers:
            _kill_tree(pid)
        for pid in self._worker_numbers:
            os.waitpid(pid, 0)
        self._worker_numbers.clear()


def _import(runner: str, libraries: Sequence[str] = ()) -> None:
    gc.disable()  # an import of torch allocates much and frees nothing: collections take a fifth of its time
    try:
        resolve(runner)
        for name in libraries:
            with suppress(Exception):  # not installed here; a task that needs it says so
                importlib.import_module(name)
    finally:
        gc.enable()


def _redirect_output(file: int) -> None:
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _kill_tree(pid: int) -> None:
    """Kill a child that is not reaped yet, its group, and its descendants in other groups."""
    tree = process_tree(pid)
    _kill_process_group(pid)
    kill(tree)


def _kill_process_group(pid: int) -> None:
    # macOS raises PermissionError for a group of zombies only.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
