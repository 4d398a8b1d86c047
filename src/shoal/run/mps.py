"""The MPS daemon of each GPU: directory, lock, start, clients and end.

With NVIDIA's Multi-Process Service the kernels of several processes run on a GPU at the same time. A CUDA program with
a daemon's pipe directory in its environment becomes a client of the server that the daemon starts for its first client.
A fault ends all clients of a server, so every GPU has a daemon and a server of its own. A program with a wrong pipe
directory runs without MPS and without limits, and raises no error: it is missing in the list of `clients`.

Source: NVIDIA, "Multi-Process Service", appendix "Tools and Interface Reference"; HyperSack, Orchestrator.
"""

import hashlib
import math
import os
import subprocess
import tempfile
import time
import weakref
from pathlib import Path

import psutil

from shoal.core.errors import MpsError
from shoal.host.process_lock import ProcessLock
from shoal.host.processes import kill, wait_for_exit

__all__ = ["COMMAND", "MpsDaemon", "MpsDirectory", "default_directory"]

COMMAND = "nvidia-cuda-mps-control"
"""The control program: it starts a daemon, and sends lines of its standard input to a running one."""

_REMEDY = "or share the GPU without MPS: sharing='plain'"

_POLL_SECONDS = 0.02

_LIMITS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
"""Variables that a daemon passes on to all its clients. A memory limit for a GPU that is not visible to the server also
drops all other limits."""

_LONGEST_PIPE = 80
"""Longest path of a pipe directory, in bytes: a UNIX socket's path has at most 108, and MPS adds names to it."""

_LOCK = "users.lock"


class MpsDirectory:
    """The directory of a daemon's pipes and logs. Each study that uses the daemon holds a lock there while it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pipe = path / "pipe"
        self.log = path / "log"
        self._lock: ProcessLock | None = None

    def acquire(self, patience: float) -> bool:
        """Take the lock, and return whether no other study holds it; others then wait until `downgrade_lock`."""
        if self._lock is None:
            self._create()
            self._lock = ProcessLock(self.path / _LOCK)
        if self.lock_alone():
            return True
        deadline = time.monotonic() + patience
        while not self._lock.shared():  # the failed attempt has released the lock
            if time.monotonic() > deadline:
                self.release_lock()
                raise MpsError(
                    f"another process has been starting the MPS daemon of {self.path} for more than {patience:g} s; "
                    "wait for it or end it, or share the GPU without MPS: sharing='plain'"
                )
            time.sleep(_POLL_SECONDS)
        return False

    def try_acquire(self) -> bool:
        """Take the lock if no study holds it, until `release_lock`; return whether it was taken."""
        try:
            self._lock = ProcessLock(self.path / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # never used, or no such directory
            return False
        if not self.lock_alone():
            self.release_lock()
        return self.is_locked

    def lock_alone(self) -> bool:
        """Take the lock alone, until `downgrade_lock` or `release_lock`; return False if another study holds it."""
        assert self._lock is not None
        return self._lock.exclusive()

    def other_gpus(self) -> list["MpsDirectory"]:
        """Return the directories of other GPUs in the same parent directory."""
        return [MpsDirectory(lock.parent) for lock in self.path.parent.glob(f"*/{_LOCK}") if lock.parent != self.path]

    def downgrade_lock(self) -> None:
        """Let other studies take the lock."""
        if self._lock is not None:
            self._lock.shared(wait=True)

    def release_lock(self) -> None:
        """Release the lock; may be called twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def is_locked(self) -> bool:
        """Whether this study holds the lock."""
        return self._lock is not None

    def _create(self) -> None:
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
                    f"{each} belongs to user {owner}, so the MPS daemon in it cannot be used; have it removed, let "
                    "the variable TMPDIR name another place, or share the GPU without MPS: sharing='plain'"
                )


def default_directory(uuid: str) -> Path:
    """Return the directory of the daemon of a GPU: a short path, the same for all studies of a user."""
    digest = hashlib.sha256(uuid.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"shoal-mps-{os.geteuid()}" / digest


class MpsDaemon:
    """The daemon of a GPU, with a directory of its own, which all studies of this user share.

    `start` ends a daemon that a killed engine has left there, and starts a new one.

    Args:
        uuid: UUID of the GPU, "GPU-...", as indices differ between a server and its clients.
        patience: Longest time of a command, in seconds.
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
        self._finalizer = weakref.finalize(self, _end_if_unused, self._control)

    @property
    def log(self) -> Path:
        """Log of the daemon; `server.log` is beside it."""
        return self.directory.log / "control.log"

    def start(self) -> None:
        """Start the daemon, or restart it if no other study uses it."""
        alone = self.directory.acquire(self._patience)
        try:
            if alone:
                self._control.end()
            if not self.alive():
                self._control.start_daemon()
        finally:
            self.directory.downgrade_lock()

    def stop(self) -> None:
        """Release the daemon, and end it unless other studies use it; also end unused daemons that a killed engine has
        left.
        """
        _end_if_unused(self._control)
        for directory in self.directory.other_gpus():
            if directory.try_acquire():
                _end_if_unused(self._control.for_directory(directory))

    def alive(self) -> bool:
        """Return whether its process runs; needs no control call."""
        return self._control.process() is not None

    def servers(self) -> list[int]:
        """Return the ids of the server processes: one after the first client has connected."""
        return self._control.query_pids("get_server_list")

    def clients(self) -> dict[int, frozenset[int]]:
        """Return the process ids of the clients of each server, by the id of the server."""
        return {server: frozenset(self._control.query_pids(f"get_client_list {server}")) for server in self.servers()}

    def environment(self, share: float = 1.0, memory: int | None = None) -> dict[str, str]:
        """Return the variables that make a process a client, if set before CUDA is initialised.

        Args:
            share: Largest fraction of the GPU's compute.
            memory: Memory limit in bytes; None: no limit.
        """
        percentage = min(100, max(1, math.ceil(100 * share)))
        variables = self._control.variables | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}
        if memory is not None:
            # The client sees one device, number 0. With any other number the limit is dropped without an error.
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, memory // 2**20)}M"
        return variables


class _Control:
    """The control program with the environment of one daemon."""

    def __init__(self, uuid: str, directory: MpsDirectory, command: str, patience: float) -> None:
        self.directory = directory
        self.owner = os.getpid()
        self.variables = {
            "CUDA_VISIBLE_DEVICES": uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(directory.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(directory.log),
        }
        self._command = command
        self._patience = patience

    def for_directory(self, directory: MpsDirectory) -> "_Control":
        """Return the control of the daemon in another directory; its GPU does not matter to `end`."""
        return _Control(self.variables["CUDA_VISIBLE_DEVICES"], directory, self._command, self._patience)

    def start_daemon(self) -> None:
        # The output goes to a file: the daemon keeps it open, so a pipe would end only with the daemon.
        with tempfile.TemporaryFile() as output_file:
            status = self._run(["-d"], stdout=output_file, stdin=subprocess.DEVNULL).returncode
            output_file.seek(0)
            output = output_file.read().decode(errors="replace").strip()
        if status == 0:
            deadline = time.monotonic() + self._patience
            while self.process() is None:
                if time.monotonic() > deadline:
                    raise MpsError(
                        f"{self._name} ended right after its start; its log: {self.directory.log}; {_REMEDY}"
                    )
                time.sleep(_POLL_SECONDS)
        elif self.process() is None:  # else another study has started it first
            raise MpsError(self._refusal(status, output))

    def process(self) -> psutil.Process | None:
        """Return the process of the daemon, if it runs."""
        try:
            process = psutil.Process(int((self.directory.pipe / f"{COMMAND}.pid").read_text()))
            # The id may be that of another program by now.
            is_daemon = any(COMMAND in word for word in process.cmdline())
            return process if is_daemon and process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
            return None

    def end(self) -> None:
        """End the daemon and its servers: by its command, else by a kill."""
        daemon = self.process()
        if daemon is None:
            return
        try:
            processes = [daemon, *daemon.children(recursive=True)]
            self.send_command("quit")
        except psutil.NoSuchProcess:
            return
        except MpsError:  # the daemon does not answer
            running = processes
        else:
            running = wait_for_exit(processes, self._patience)
        kill(running)
        wait_for_exit(running, self._patience)

    def query_pids(self, line: str) -> list[int]:
        """Return the process ids that a command prints, one on each line."""
        answer = self.send_command(line).split()
        if not all(word.isdecimal() for word in answer):
            raise MpsError(f"{self._name} answers {' '.join(answer)!r} to {line!r}; its log: {self.directory.log}")
        return [int(word) for word in answer]

    def send_command(self, line: str) -> str:
        done = self._run([], input=f"{line}\n".encode(), stdout=subprocess.PIPE)
        output = done.stdout.decode(errors="replace").strip()
        if done.returncode != 0:
            raise MpsError(
                f"{self._name} failed at {line!r}: exit status {done.returncode}, {output!r}; its log: "
                f"{self.directory.log}"
            )
        return output

    def _run(self, arguments: list[str], **streams: object) -> "subprocess.CompletedProcess[bytes]":
        # The program has its own session, so that a Ctrl-C of the terminal reaches only the engine.
        inherited = {name: value for name, value in os.environ.items() if name not in _LIMITS}
        try:
            return subprocess.run(  # type: ignore[call-overload, no-any-return]
                [self._command, *arguments],
                stderr=subprocess.STDOUT,
                env=inherited | self.variables,
                timeout=self._patience,
                start_new_session=True,
                check=False,
                **streams,
            )
        except FileNotFoundError as error:
            raise MpsError(
                f"{self._command!r} is not installed, or not on PATH; it comes with NVIDIA's driver for Linux. Install "
                f"it, {_REMEDY}"
            ) from error
        except OSError as error:
            raise MpsError(
                f"{self._command!r} may not be run here: {error}; ask the administrator of this machine to allow it, "
                f"{_REMEDY}"
            ) from error
        except subprocess.TimeoutExpired as error:
            what = " ".join(arguments) or streams["input"]
            raise MpsError(
                f"{self._name} did not answer {what!r} within {self._patience:g} s; its log: {self.directory.log}"
            ) from error

    def _refusal(self, status: int, output: str) -> str:
        if "already running" in output:
            return (
                f"another MPS daemon has taken the pipe directory {self.directory.pipe}; end it with: echo quit | "
                f"CUDA_MPS_PIPE_DIRECTORY={self.directory.pipe} {self._command}, {_REMEDY}"
            )
        remedy = "see its log" if "permi" not in output.lower() else "ask the administrator of this machine to allow it"
        return (
            f"{self._name} cannot start: exit status {status}, {output!r}; {remedy} ({self.directory.log}), {_REMEDY}"
        )

    @property
    def _name(self) -> str:
        return f"the MPS daemon of {self.variables['CUDA_VISIBLE_DEVICES']}"


def _end_if_unused(control: _Control) -> None:
    if os.getpid() != control.owner:  # this process is a fork, which has copies of the objects of the engine
        return
    directory = control.directory
    try:
        if directory.is_locked and directory.lock_alone():
            control.end()
    finally:
        directory.release_lock()
