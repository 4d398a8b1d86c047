"""One MPS daemon for each GPU: its directory and lock, its start, its clients, its end.

With NVIDIA's Multi-Process Service the kernels of several processes run on a GPU at the same time. A CUDA program that
is started with a daemon's pipe directory in its environment becomes a client of the server that the daemon starts for
its first client. A fault ends all clients of a server, so every GPU has a daemon and a server of its own. A program
whose pipe directory is wrong runs without MPS and without limits, and nobody says so: `clients` tells.

Source: NVIDIA, "Multi-Process Service", appendix "Tools and Interface Reference"; HyperSack, Orchestrator.
"""

import hashlib
import math
import os
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import psutil

from shoal.cluster.process_lock import ProcessLock
from shoal.cluster.processes import kill
from shoal.core.errors import MpsError

__all__ = ["COMMAND", "MpsDaemon", "MpsDirectory", "default_directory", "is_alive"]


COMMAND = "nvidia-cuda-mps-control"
"""Starts a daemon, and hands lines of its standard input to one that runs."""


_PLAIN = "or share the GPU without MPS: sharing='plain'"


_PAUSE_SECONDS = 0.02


_LIMITS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
"""Variables that a daemon would hand on to all of its clients; a memory limit that names a GPU that the server does not
see would also drop all others."""


_LONGEST_PIPE = 80
"""Bytes of a pipe directory: the path of a UNIX socket has at most 108, and MPS puts names of its own behind it."""


_LOCK = "users.lock"


class MpsDirectory:
    """Where a daemon has its pipes and logs. Whoever uses the daemon holds an flock there, which vanishes with him.

    Args:
        path: of one GPU alone; made when it is entered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pipe = path / "pipe"
        self.log = path / "log"
        self._lock: ProcessLock | None = None

    def enter(self, patience: float) -> bool:
        """Take part in its use; whether nobody else does, who then stays out until `share`.

        Args:
            patience: seconds to wait for another who is just starting the daemon.

        Raises:
            MpsError: it is too long a path, cannot be made, belongs to another user, or the other does not get done.
        """
        if self._lock is None:
            self._make()
            self._lock = ProcessLock(self.path / _LOCK)
        if self.alone():
            return True
        deadline = time.monotonic() + patience
        while not self._lock.shared():  # the failed attempt has given up what was held
            if time.monotonic() > deadline:
                self.leave()
                raise MpsError(
                    f"another process has been starting the MPS daemon of {self.path} for more than {patience:g} s; "
                    "wait for it or end it, or share the GPU without MPS: sharing='plain'"
                )
            time.sleep(_PAUSE_SECONDS)
        return False

    def claim(self) -> bool:
        """Take part in its use if nobody does, who then stays out until `leave`; whether that was so."""
        try:
            self._lock = ProcessLock(self.path / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # it was never used, or is no such directory
            return False
        if not self.alone():
            self.leave()
        return self.entered

    def alone(self) -> bool:
        """Whether nobody else uses it, who then stays out until `share` or `leave`."""
        assert self._lock is not None
        return self._lock.exclusive()

    def others(self) -> list["MpsDirectory"]:
        """Those beside it, of other GPUs."""
        return [MpsDirectory(lock.parent) for lock in self.path.parent.glob(f"*/{_LOCK}") if lock.parent != self.path]

    def share(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.shared(wait=True)

    def leave(self) -> None:
        """Use it no more; may be called twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def entered(self) -> bool:
        """Whether its use has been taken part in, and not yet been left."""
        return self._lock is not None

    def _make(self) -> None:
        if len(os.fsencode(self.pipe)) > _LONGEST_PIPE:
            raise MpsError(
                f"the pipe directory {self.pipe} has {len(os.fsencode(self.pipe))} bytes, MPS takes at most "
                f"{_LONGEST_PIPE}; let the variable TMPDIR name a directory with a shorter path, such as /tmp"
            )
        try:
            for each in (self.path.parent, self.path, self.pipe, self.log):
                each.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise MpsError(
                f"the directory {self.path} of an MPS daemon cannot be made: {error}; remove what is there, or let the "
                "variable TMPDIR name another place"
            ) from error
        for each in (self.path.parent, self.path):
            if (owner := each.lstat().st_uid) != os.geteuid():
                raise MpsError(
                    f"{each} belongs to user {owner}, so the MPS daemon in it is not ours to use; have it removed, let "
                    "the variable TMPDIR name another place, or share the GPU without MPS: sharing='plain'"
                )


def default_directory(uuid: str) -> Path:
    """Where the daemon of a GPU has its directories: one place for all studies of a user, and a short one."""
    digest = hashlib.sha256(uuid.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"shoal-mps-{os.geteuid()}" / digest


class MpsDaemon:
    """The daemon of a GPU, with a directory of its own, which all studies of this user share.

    What a killed engine has left is found there, ended, and begun anew.

    Args:
        uuid: of the GPU, "GPU-...": numbers mean something else to a server than to its clients.
        directory: for pipes and logs, of this GPU alone; by default `default_directory`.
        command: the control program.
        patience: seconds that it may take to do as it is told.

    Raises:
        MpsError: the UUID is none of a whole GPU.
    """

    def __init__(
        self, uuid: str, directory: Path | None = None, *, command: str = COMMAND, patience: float = 10.0
    ) -> None:
        if not uuid.startswith("GPU-"):
            raise MpsError(f"an MPS daemon serves a whole GPU, whose UUID begins with 'GPU-', got {uuid!r}")
        self.uuid = uuid
        self.directory = MpsDirectory(directory if directory is not None else default_directory(uuid))
        self._control = _Control(uuid, self.directory, command, patience)
        self._patience = patience
        self._finalizer = weakref.finalize(self, _leave, self._control)

    @property
    def log(self) -> Path:
        """The file to which the daemon writes; `server.log` lies beside it."""
        return self.directory.log / "control.log"

    def start(self) -> None:
        """Begin the daemon; called again, begin it anew. One that other studies use too is left as it is.

        Raises:
            MpsError: it is not installed, forbidden, cannot start, or is not ours to use.
        """
        alone = self.directory.enter(self._patience)
        try:
            if alone:
                self._control.end()
            if not self.alive():
                self._control.launch()
        finally:
            self.directory.share()

    def stop(self) -> None:
        """Use the daemon no more, and end it and its servers unless other studies use them; may be called twice.

        So are those of other GPUs that nobody uses: what a killed engine has left, and the next one did not need.
        """
        _leave(self._control)
        for directory in self.directory.others():
            if directory.claim():
                _leave(self._control.beside(directory))

    def alive(self) -> bool:
        """Whether its process runs; costs no control call."""
        return self._control.process() is not None

    def servers(self) -> list[int]:
        """The ids of the server processes: one from the first client on.

        Raises:
            MpsError: the daemon does not answer.
        """
        return self._control.ask_numbers("get_server_list")

    def clients(self) -> dict[int, frozenset[int]]:
        """The id of each server process, with those of the processes that are its clients.

        Raises:
            MpsError: the daemon does not answer, or a server has just gone.
        """
        return {server: frozenset(self._control.ask_numbers(f"get_client_list {server}")) for server in self.servers()}

    def environment(self, share: float = 1.0, memory: int | None = None) -> dict[str, str]:
        """The variables with which a process becomes a client, before CUDA is initialised in it.

        Args:
            share: of the GPU's compute that it may use at most.
            memory: bytes that it may take at most; None: all.
        """
        percentage = min(100, max(1, math.ceil(100 * share)))
        variables = self._control.place | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}
        if memory is not None:
            # The client sees one device, number 0. Any other number would drop the limit without a word.
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, memory // 2**20)}M"
        return variables


class _Control:
    """The control program with the environment that names one daemon to it."""

    def __init__(self, uuid: str, directory: MpsDirectory, command: str, patience: float) -> None:
        self.directory = directory
        self.owner = os.getpid()
        self.place = {
            "CUDA_VISIBLE_DEVICES": uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(directory.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(directory.log),
        }
        self._command = command
        self._patience = patience

    def beside(self, directory: MpsDirectory) -> "_Control":
        """Of the daemon in another directory; what it is asked does not depend on its GPU."""
        return _Control(self.place["CUDA_VISIBLE_DEVICES"], directory, self._command, self._patience)

    def launch(self) -> None:
        """Start the daemon and wait until it has its place."""
        # Into a file: the daemon keeps the standard output that it is given, and a pipe would not end before it does.
        with tempfile.TemporaryFile() as output:
            status = self._run(["-d"], stdout=output, stdin=subprocess.DEVNULL).returncode
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        if status == 0:
            deadline = time.monotonic() + self._patience
            while self.process() is None:
                if time.monotonic() > deadline:
                    raise MpsError(f"{self._whose} has started and gone; its log: {self.directory.log}; {_PLAIN}")
                time.sleep(_PAUSE_SECONDS)
        elif self.process() is None:  # else another study has been quicker
            raise MpsError(self._refusal(status, said))

    def process(self) -> psutil.Process | None:
        """Of the daemon, if it runs."""
        try:
            process = psutil.Process(int((self.directory.pipe / f"{COMMAND}.pid").read_text()))
            # The number may long be another program's.
            is_daemon = any(COMMAND in word for word in process.cmdline())
            return process if is_daemon and process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
            return None

    def end(self) -> None:
        """End the daemon and its servers, in order if it heeds, else by force."""
        daemon = self.process()
        if daemon is None:
            return
        try:
            processes = [daemon, *daemon.children(recursive=True)]
            self.ask("quit")
        except psutil.NoSuchProcess:
            return
        except MpsError:  # it is beyond orders
            remaining = processes
        else:
            remaining = _outlast(processes, self._patience)
        kill(remaining)
        _outlast(remaining, self._patience)

    def ask_numbers(self, line: str) -> list[int]:
        """The process ids that a command prints, one a line."""
        answer = self.ask(line).split()
        if not all(word.isdecimal() for word in answer):
            raise MpsError(f"{self._whose} answers {' '.join(answer)!r} to {line!r}; its log: {self.directory.log}")
        return [int(word) for word in answer]

    def ask(self, line: str) -> str:
        """What the daemon answers to a line."""
        done = self._run([], input=f"{line}\n".encode(), stdout=subprocess.PIPE)
        said = done.stdout.decode(errors="replace").strip()
        if done.returncode != 0:
            raise MpsError(
                f"{self._whose} did not do {line!r}: exit status {done.returncode}, {said!r}; its log: "
                f"{self.directory.log}"
            )
        return said

    def _run(self, arguments: list[str], **streams: object) -> "subprocess.CompletedProcess[bytes]":
        # A session of its own: a Ctrl-C of the terminal is for the engine.
        inherited = {name: value for name, value in os.environ.items() if name not in _LIMITS}
        try:
            return subprocess.run(  # type: ignore[call-overload, no-any-return]
                [self._command, *arguments],
                stderr=subprocess.STDOUT,
                env=inherited | self.place,
                timeout=self._patience,
                start_new_session=True,
                check=False,
                **streams,
            )
        except FileNotFoundError as error:
            raise MpsError(
                f"{self._command!r} is not installed, or not on PATH; it comes with NVIDIA's driver for Linux. Install "
                f"it, {_PLAIN}"
            ) from error
        except OSError as error:
            raise MpsError(
                f"{self._command!r} may not be run here: {error}; have it allowed by who runs this machine, {_PLAIN}"
            ) from error
        except subprocess.TimeoutExpired as error:
            what = " ".join(arguments) or streams["input"]
            raise MpsError(
                f"{self._whose} did not heed {what!r} within {self._patience:g} s; its log: {self.directory.log}"
            ) from error

    def _refusal(self, status: int, said: str) -> str:
        if "already running" in said:
            return (
                f"another MPS daemon has taken the pipe directory {self.directory.pipe}; end it with: echo quit | "
                f"CUDA_MPS_PIPE_DIRECTORY={self.directory.pipe} {self._command}, {_PLAIN}"
            )
        remedy = "see its log" if "permi" not in said.lower() else "have it allowed by who runs this machine"
        return f"{self._whose} cannot start: exit status {status}, {said!r}; {remedy} ({self.directory.log}), {_PLAIN}"

    @property
    def _whose(self) -> str:
        return f"the MPS daemon of {self.place['CUDA_VISIBLE_DEVICES']}"


def _outlast(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after some seconds; a zombie does not, which in a container nobody may ever reap."""
    deadline = time.monotonic() + seconds
    while (running := [process for process in processes if is_alive(process.pid)]) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return running


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _leave(control: _Control) -> None:
    if os.getpid() != control.owner:  # a fork of the engine, which has copies of all it holds
        return
    directory = control.directory
    try:
        if directory.entered and directory.alone():
            control.end()
    finally:
        directory.leave()
