"""The process that has imported torch and the runner once, and forks a worker whenever the engine asks.

Why not the standard library's `multiprocessing` "forkserver": its children import the user's `__main__` again, which
trains once more where a script has no `if __name__ == "__main__"` guard and fails where there is no file (a notebook);
its server is one per process, so its settings would be shared with the user's own pools; and it drops an ImportError of
a preloaded module. Here the task arrives as bytes, nothing imports `__main__`, and the engine learns the exit status of
every worker from the one process that can wait for it.

The engine holds one end of the control socket; this process, the other:

- engine to server: a `REQUEST` with the worker's number, and the worker's end of its connection as a file descriptor;
  one without a descriptor asks for the end of that worker, and of all that it started;
- server to engine: a `NOTICE` when the server is ready, and one when a worker has ended.

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

from shoal.backend.base import Workplace
from shoal.backend.perform import resolve
from shoal.backend.process import work
from shoal.cluster.processes import family, kill

__all__ = ["NOTICE", "READY", "REQUEST", "Setup", "main"]

REQUEST = struct.Struct("!Q")
"""The number of the worker to fork or to kill, 1 or more."""

NOTICE = struct.Struct("!QQq")
"""A worker's number; its pid and its status as of `waitpid`, or pid 0 and the errno of the fork that failed."""

READY = 0
"""In place of a worker's number: the server has imported everything."""


@dataclass(frozen=True)
class Setup:
    """What a server reads from its standard input.

    Args:
        argv: `sys.argv` of the engine.
        control: file descriptor of the control socket.
        workplace: for all its workers.
    """

    argv: list[str]
    control: int
    workplace: Workplace


def main() -> None:
    """Import what the workers need, then serve until the engine is gone."""
    setup: Setup = pickle.load(sys.stdin.buffer)
    sys.argv[:] = setup.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=setup.control) as control:
        control.set_inheritable(False)
        gc.disable()  # importing torch makes much and frees nothing: looking for garbage takes a fifth of its time
        resolve(setup.workplace.runner)
        gc.enable()
        gc.freeze()  # what is alive now stays out of the workers' collections, and so on pages they share
        _Server(control, setup.workplace).serve()
    os._exit(0)  # nothing is left to flush, and taking torch down in order takes a sixth of a second


class _Server:
    """The loop of the server and its children."""

    def __init__(self, control: socket.socket, workplace: Workplace) -> None:
        self._control = control
        self._workplace = workplace
        self._numbers: dict[int, int] = {}  # pid -> number
        self._wakeup, self._alarm = socket.socketpair()

    def serve(self) -> None:
        """Fork and reap until the control socket ends; leaves no child behind."""
        self._wakeup.setblocking(False)
        self._alarm.setblocking(False)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the wake-up needs a handler
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the control socket ends the server, and in order
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                self._control.sendall(NOTICE.pack(READY, os.getpid(), 0))
                while self._turn():
                    pass
        finally:
            self._kill_all()
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
            self._alarm.close()

    def _turn(self) -> bool:
        """Wait for something and handle it; whether to go on."""
        ready = wait([self._control, self._wakeup])
        if self._wakeup in ready:
            self._wakeup.recv(4096)
            self._reap()
        if self._control in ready:
            data, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, 1)
            if not data:
                return False
            (number,) = REQUEST.unpack(data)
            if descriptors:
                self._fork(number, descriptors[0])
            else:
                self._kill(number)
        return True

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
            work(Connection(descriptor), self._workplace)
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


def _kill_tree(pid: int) -> None:
    """Kill a child, its group, and what it has started in groups of their own; it is not reaped yet."""
    tree = family(pid)
    _kill_group(pid)
    kill(tree)


def _kill_group(pid: int) -> None:
    # PermissionError is what macOS says of a group in which only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
