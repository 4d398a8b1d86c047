"""The process that has imported torch and the runner once, and forks a worker whenever the engine asks.

Why not the standard library's `multiprocessing` "forkserver": its children import the user's `__main__` again, which
trains once more where a script has no `if __name__ == "__main__"` guard and fails where there is no file (a notebook);
its server is one per process, so its settings would be shared with the user's own pools; and it drops an ImportError of
a preloaded module. Here the task arrives as bytes, nothing imports `__main__`, and the engine learns the exit status of
every worker from the one process that can wait for it.

The engine holds one end of the control socket; this process, the other:

- engine to server: a `REQUEST` with the worker's number, and the worker's end of its connection as a file descriptor;
  one without a descriptor asks for the end of that worker, and of all that it started;
- of number `STUDY`, it begins a study: its descriptors are a file with a pickled `Setup`, and the log for what the
  server prints; one without descriptors ends the study, with all its workers;
- server to engine: a `NOTICE` of number `STUDY` when the server has begun or ended a study, and one when a worker has
  ended.

A server outlives its study, so that the next one of the same process need not import torch again; without a study for
`IDLE_SECONDS`, it exits. User code runs in workers only, so a study leaves nothing behind in the server.

End of file on that socket means the engine is gone: the server kills all its workers and exits. It has a session of its
own, so a Ctrl-C or hang-up of the terminal reaches the engine alone. It stays single-threaded, as `fork` needs.
"""

import errno
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from shoal.backends.base import WorkerContext
from shoal.backends.process import work
from shoal.backends.run_job import resolve
from shoal.cluster.processes import family, kill

__all__ = ["NOTICE", "REQUEST", "STUDY", "Setup", "main"]

REQUEST = struct.Struct("!Q")
"""The number of the worker to fork or to kill, 1 or more."""

NOTICE = struct.Struct("!QQq")
"""A worker's number; its pid and its status as of `waitpid`, or pid 0 and the errno of the fork that failed."""

STUDY = 0
"""In place of a worker's number: the request or notice is about a study."""

IDLE_SECONDS = 300.0
"""Without a study, after which a server exits."""


@dataclass(frozen=True)
class Setup:
    """What a server is to know of a study.

    Args:
        argv: `sys.argv` of the engine.
        directory: working directory of the engine; "" if it was removed.
        worker_context: for all workers.
    """

    argv: list[str]
    directory: str
    worker_context: WorkerContext


def main() -> None:
    """Serve one study after another until the engine is gone; the program's argument is the control socket's number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.set_inheritable(False)
        _Server(control).serve()
    os._exit(0)  # nothing is left to flush, and taking torch down in order takes a sixth of a second


class _Server:
    """The loop of the server and its children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._worker_context: WorkerContext | None = None
        self._numbers: dict[int, int] = {}  # pid -> number
        self._wakeup, self._alarm = socket.socketpair()

    def serve(self) -> None:
        """Fork and reap until the control socket ends; leaves no child behind."""
        self._wakeup.setblocking(False)
        self._alarm.setblocking(False)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the wake-up needs a handler
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                while self._turn():
                    pass
        finally:
            self._kill_all()
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
            self._alarm.close()

    def _turn(self) -> bool:
        """Wait for something and handle it; whether to go on."""
        ready = wait([self._control, self._wakeup], IDLE_SECONDS if self._worker_context is None else None)
        if self._wakeup in ready:
            self._wakeup.recv(4096)
            self._reap()
        if self._control in ready:
            data, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, 2)
            if not data:
                return False
            (number,) = REQUEST.unpack(data)
            if number == STUDY and descriptors:
                self._begin(*descriptors)
            elif number == STUDY:
                self._end()
            elif descriptors:
                self._fork(number, descriptors[0])
            else:
                self._kill(number)
        return bool(ready)

    def _begin(self, setup: int, log: int) -> None:
        """Begin a study: import what its workers need, which SIGTERM ends."""
        _print_to(log)
        with open(setup, "rb") as file:
            study: Setup = pickle.load(file)
        sys.argv[:] = study.argv
        try:
            os.chdir(study.directory)
        except OSError:  # it was removed, or is closed to this user; oneMKL cannot be loaded from such a directory
            os.chdir("/")
        sys.path_importer_cache.clear()  # relative directories were those of the last study
        gc.disable()  # importing torch makes much and frees nothing: looking for garbage takes a fifth of its time
        resolve(study.worker_context.runner)
        gc.enable()
        gc.freeze()  # what is alive now stays out of the workers' collections, and so on pages they share
        self._worker_context = study.worker_context
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the control socket ends the server, and in order
        self._control.sendall(NOTICE.pack(STUDY, os.getpid(), 0))

    def _end(self) -> None:
        """End the study, if there is one, and its workers; its directory, and where its engine was, may then go."""
        self._kill_all()
        _print_to(os.open(os.devnull, os.O_WRONLY))
        os.chdir("/")
        self._worker_context = None
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._control.sendall(NOTICE.pack(STUDY, os.getpid(), 0))

    def _kill(self, number: int) -> None:
        """Kill a worker, if there is one of that number; its end is told as any other."""
        for pid, mine in self._numbers.items():
            if mine == number:
                _kill_tree(pid)

    def _fork(self, number: int, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        try:
            pid = os.fork()
        except OSError as error:
            self._control.sendall(NOTICE.pack(number, 0, error.errno or errno.EAGAIN))
        else:
            if pid == 0:
                self._become_worker(descriptor)
            self._numbers[pid] = number
            # The child does the same; whoever comes first, the group exists before it is ever killed.
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)
        os.close(descriptor)

    def _become_worker(self, descriptor: int) -> None:
        """Work in the child and never return to the server's loop."""
        status = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for end in (self._control, self._wakeup, self._alarm):
                end.close()
            assert self._worker_context is not None
            work(Connection(descriptor), self._worker_context)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Tell the engine of every child that has ended, after ending what the child started."""
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._numbers.pop(pid, None)
            if number is not None:
                _kill_group(pid)
                self._control.sendall(NOTICE.pack(number, pid, status))

    def _kill_all(self) -> None:
        for pid in self._numbers:
            _kill_tree(pid)
        for pid in self._numbers:
            os.waitpid(pid, 0)
        self._numbers.clear()


def _print_to(file: int) -> None:
    """Let what this process prints go to a file descriptor, which is closed."""
    for printed in (1, 2):
        os.dup2(file, printed)
    os.close(file)


def _kill_tree(pid: int) -> None:
    """Kill a child, its group, and what it has started in groups of their own; it is not reaped yet."""
    tree = family(pid)
    _kill_group(pid)
    kill(tree)


def _kill_group(pid: int) -> None:
    # PermissionError is what macOS says of a group in which only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
